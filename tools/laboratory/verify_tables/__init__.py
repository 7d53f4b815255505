"""Every entry of the exact tables against a correctly rounded reference."""

"""Speed, bytes and distance: this library beside others, side by side in one run."""

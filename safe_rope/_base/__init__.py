"""What several rooms need and no library has; what `scan` uses of it never imports torch."""

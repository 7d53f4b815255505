"""What a value is: names, numbers, dtypes and tensors of one file, followed without running it."""

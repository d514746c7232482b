"""What is read of a checkpoint's encoder of images."""

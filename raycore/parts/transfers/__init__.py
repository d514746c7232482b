"""Keys and values, and embeddings of images, that come from elsewhere: host memory, files, other ranks."""

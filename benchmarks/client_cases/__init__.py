"""What `client_libraries.py` does with each library. Runs in the interpreter of the libraries, without raycore."""

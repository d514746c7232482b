"""What `client_libraries.py` does with each library. Runs in the interpreter that has the libraries, without raycore."""

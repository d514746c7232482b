"""Native kernels for CPUs, as torch operations `torch.ops.raycore`.

The C++ sources in `csrc` are compiled when raycore is installed, if there is a compiler, once for each instruction set.
The library links to nothing: it finds libtorch's stable C functions in the running process. So it is built without
torch, and one binary works with every torch that raycore supports.
"""

"""How the bytes of an array reach another rank.

    host.py          what a transport can do; numpy arrays
    device.py        device arrays, whose addresses go to a GPU-aware MPI
    staged.py        device arrays, through pinned host memory
    gpu_aware.py     which of these: whether MPI takes the addresses

All ranks of a communicator compute on the same kind of device, and cut long arrays in the same way.
"""

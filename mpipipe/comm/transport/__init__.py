"""How the bytes of an array reach another rank.

A transport starts sends and receives of whole arrays and hands back requests with two methods, `Test()` and `Cancel()`.
Whoever takes one owns it: see comm.requests, and the mailbox for the many of a step.
It knows peers, channels and tags; what a message means is the mailbox's business:

    empty(shape, dtype)                   a receive buffer in the memory where this rank computes
    isend(array, peer, channel, tag)      the array must stay as it is until the request tests true
    irecv(array, peer, channel, tag)      the array holds the message once the request tests true
    retire(array)                         work queued so far is the last that reads this receive buffer
    progress()                            let everything under way advance, if that is this object's business
    forget(), abandon(), close()          drop spare memory; give up after a failure; free the communicators

    host.py       numpy arrays
    direct.py     device arrays, whose addresses go to a GPU-aware MPI
    staged.py     device arrays, through pinned host memory
    choose.py     which of these, on the evidence of gpu_aware.py

All ranks of a communicator cut long arrays in the same way, so a rank that computes on the host and one that computes
on a GPU understand each other.
"""

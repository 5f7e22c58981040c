"""`python -m mpipipe bench`: measurements next to a reference that runs in the same job, as ratios.

timing              candidates that take turns, times on a GPU, how both are reported
pipeline            the machinery on small stages, messages
train               a GPT's step next to its simulation, in slices, and next to PyTorch's
attention           kernels on the host, and a ring
threads             a rank with several threads next to one thread, and next to several ranks
peers               a pipeline of modules, and PyTorch's over gloo
results             most of these, several times, as one page
gpu/                kernels and steps on a GPU
torch_gpt           the same GPT in PyTorch
"""

"""`python -m mpipipe bench`: measurements next to a reference that runs in the same job, as ratios.

timing              candidates that take turns, times on a GPU, how both are reported
pipeline            the machinery on small stages, messages
schedules           large schedules, and how far searched ones are from the best
train               trainings next to their predictions: a GPT's step, plans, the memory of a dry run
files               checkpoints next to dd, tokens next to the library tokenizers
attention           kernels on the host, and a ring
threads             a rank with several threads next to one thread, and next to several ranks
peers               a pipeline and a ring, and PyTorch's over gloo
results             most of these, several times, as one page
gpu/                kernels, steps and messages on GPUs
torch_gpt           the same GPT in PyTorch
"""

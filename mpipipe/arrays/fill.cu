extern "C" __global__ void fill(T* target, long long count, T value) {
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) target[at] = value;
}

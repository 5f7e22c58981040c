// Normalisation of the rows of matrices (rows, width); nn/layers/norm.py has the formulas. Compiled for T, the dtype;
// V, elements of one word of memory, which divides width; G, threads that share a row; and K, words of a row that one
// thread keeps in registers. A block has 4 rows of 32 threads, or one of G. K is 0 where a row is too long: it is read
// again for each look.
typedef accumulator<T>::type A;
typedef pack<T, V> P;
constexpr int ROWS = G == 32 ? 4 : 1, N = K ? K : 1;
constexpr int THREADS = G * ROWS;

// Calls f(j, c) for the j-th of the words of a row that this thread has, which is word c of the row.
template <typename F> __device__ __forceinline__ void for_each_word(int words, F f) {
    if (K) {
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (threadIdx.x + j * G < words) f(j, threadIdx.x + j * G);
    } else {
#pragma unroll 2
        for (int c = threadIdx.x; c < words; c += G) f(0, c);
    }
}

// The words of a row: kept, or read again.
struct row_of {
    typedef typename word_of<sizeof(P)>::type word_type;
    const T* from;
    word_type kept[N];
    __device__ __forceinline__ void start(const T* row, int words) {
        from = row;
        if (K) for_each_word(words, [&](int j, int c) { kept[j] = *reinterpret_cast<const word_type*>(row + c * V); });
    }
    __device__ __forceinline__ P word(int j, int c) const {
        P value;
        if (K) memcpy(&value, &kept[j], sizeof(P));
        else value = load<V>(from + c * V);
        return value;
    }
};

// The mean of f(value) over a row.
template <typename F> __device__ __forceinline__ A mean_of(const row_of& x, int width, A* shared, F f) {
    A sum = 0;
    for_each_word(width / V, [&](int j, int c) {
        const P in = x.word(j, c);
#pragma unroll
        for (int k = 0; k < V; ++k) sum += f(widen(in.at[k]));
    });
    return add_up(sum, shared) / width;
}

// y = gain (x - mean) scale + bias, scale = 1 / sqrt(mean of (x - mean)^2 + eps); mean and bias 0 unless CENTRED. Reads
// a row once where K is not 0. Moves 2 T an element; gain and bias stay in cache.
template <bool CENTRED>
__device__ __forceinline__ void forward(const T* x, const T* gain, const T* bias, T* y, A* scale, long long rows,
                                        int width, A eps) {
    __shared__ A shared[32];
    for (long long row = blockIdx.x * ROWS + threadIdx.y; row < rows; row += gridDim.x * (long long)ROWS) {
        row_of from;
        from.start(x + row * width, width / V);
        const A mean = CENTRED ? mean_of(from, width, shared, [](A v) { return v; }) : A(0);
        const A square = mean_of(from, width, shared, [=](A v) { return (v - mean) * (v - mean); });
        const A r = A(1) / sqrt(square + eps);
        if (threadIdx.x == 0) scale[row] = r;
        T* to = y + row * width;
        for_each_word(width / V, [&](int j, int c) {
            const P in = from.word(j, c), g = load<V>(gain + c * V);
            P add, out;
            if (CENTRED) add = load<V>(bias + c * V);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const A normal = (widen(in.at[k]) - mean) * r * widen(g.at[k]);
                out.at[k] = narrow<T>(CENTRED ? normal + widen(add.at[k]) : normal);
            }
            store(to + c * V, out);
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const T* x, const T* gain, T* y, A* scale, long long rows, int width, A eps) {
    forward<false>(x, gain, (const T*)0, y, scale, rows, width, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS) layer_norm(const T* x, const T* gain, const T* bias, T* y,
                                                                 A* scale, long long rows, int width, A eps) {
    forward<true>(x, gain, bias, y, scale, rows, width, eps);
}

// The sums of all rows of a block for each column, kept by the threads that have the column.
template <int COUNT> struct columns {
    A sum[COUNT][N][V];
    A* to[COUNT];

    // Where K is 0 the sums lie in memory from the start.
    __device__ __forceinline__ void start(A* const (&parts)[COUNT], int width) {
#pragma unroll
        for (int s = 0; s < COUNT; ++s) {
            to[s] = parts[s] + (long long)blockIdx.x * width;
#pragma unroll
            for (int j = 0; j < N; ++j)
                for (int k = 0; k < V; ++k) sum[s][j][k] = 0;
            if (!K) for_each_word(width / V, [&](int, int c) {
                for (int k = 0; k < V; ++k) to[s][c * V + k] = 0;
            });
        }
    }
    __device__ __forceinline__ void add(int s, int j, int c, int k, A value) {
        if (K) sum[s][j][k] += value;
        else to[s][c * V + k] += value;
    }
    // Adds up the rows of a block, one after the other through shared memory of width values, and writes the sums.
    __device__ __forceinline__ void write(int width, A* shared) {
#pragma unroll
        for (int s = 0; s < COUNT; ++s) {
            for (int y = 0; K && y < ROWS; ++y) {
                if (ROWS > 1) __syncthreads();
                if (threadIdx.y == y) for_each_word(width / V, [&](int j, int c) {
                    pack<A, V> out;
#pragma unroll
                    for (int k = 0; k < V; ++k) {
                        A value = sum[s][j][k];
                        if (y > 0) value += shared[c * V + k];
                        if (y < ROWS - 1) shared[c * V + k] = value;
                        out.at[k] = value;
                    }
                    if (y == ROWS - 1) store(to[s] + c * V, out);
                });
            }
        }
    }
};

// With n = (x - mean) r, the mean 0 unless CENTRED: dx = r (gain dy - n mean(gain dy n) - mean(gain dy)), the last term
// only if CENTRED. Each block writes its sums of dy n, and of dy if CENTRED, to row blockIdx.x of `dgain` and `dbias`
// (gridDim.x, width). If SUMMED, `more` is added to dx when that has been rounded. Reads rows once where K is not 0.
// Moves 3 T an element, 4 T if SUMMED.
template <bool CENTRED, bool SUMMED>
__device__ __forceinline__ void backward(const T* dy, const T* x, const A* scale, const T* gain, const T* more, T* dx,
                                         A* dgain, A* dbias, long long rows, int width) {
    __shared__ A shared[64], staged[ROWS > 1 ? N * V * G : 1];
    A* parts[CENTRED ? 2 : 1];
    parts[0] = dgain;
    if (CENTRED) parts[CENTRED] = dbias;
    columns<CENTRED ? 2 : 1> sums;
    sums.start(parts, width);
    for (long long row = blockIdx.x * ROWS + threadIdx.y; row < rows; row += gridDim.x * (long long)ROWS) {
        row_of x_row, dy_row;
        x_row.start(x + row * width, width / V);
        dy_row.start(dy + row * width, width / V);
        const A r = scale[row];
        const A mean = CENTRED ? mean_of(x_row, width, shared, [](A v) { return v; }) : A(0);
        A means[2] = {0, 0};
        for_each_word(width / V, [&](int j, int c) {
            const P in = x_row.word(j, c), d = dy_row.word(j, c), g = load<V>(gain + c * V);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const A dk = widen(d.at[k]), normal = (widen(in.at[k]) - mean) * r;
                sums.add(0, j, c, k, dk * normal);
                if (CENTRED) sums.add(CENTRED, j, c, k, dk);
                means[0] += widen(g.at[k]) * dk * normal;
                means[1] += widen(g.at[k]) * dk;
            }
        });
        if (CENTRED) add_up(means, shared);
        else means[0] = add_up(means[0], shared);
        const A turned = means[0] / width, shifted = CENTRED ? means[1] / width : A(0);
        T* to = dx + row * width;
        for_each_word(width / V, [&](int j, int c) {
            const P in = x_row.word(j, c), d = dy_row.word(j, c), g = load<V>(gain + c * V);
            P out, also;
            if (SUMMED) also = load<V>(more + row * width + c * V);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const A normal = (widen(in.at[k]) - mean) * r;
                out.at[k] = narrow<T>(r * (widen(g.at[k]) * widen(d.at[k]) - normal * turned - shifted));
                if (SUMMED) out.at[k] = narrow<T>(rounded_sum(widen(also.at[k]), widen(out.at[k])));
            }
            store(to + c * V, out);
        });
    }
    sums.write(width, staged);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_backward(const T* dy, const T* x, const A* scale, const T* gain, T* dx, A* dgain, long long rows,
                      int width) {
    backward<false, false>(dy, x, scale, gain, (const T*)0, dx, dgain, (A*)0, rows, width);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_backward(const T* dy, const T* x, const A* scale, const T* gain, T* dx, A* dgain, A* dbias,
                        long long rows, int width) {
    backward<true, false>(dy, x, scale, gain, (const T*)0, dx, dgain, dbias, rows, width);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_backward_add(const T* dy, const T* x, const A* scale, const T* gain, const T* more, T* dx, A* dgain,
                          long long rows, int width) {
    backward<false, true>(dy, x, scale, gain, more, dx, dgain, (A*)0, rows, width);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_backward_add(const T* dy, const T* x, const A* scale, const T* gain, const T* more, T* dx, A* dgain,
                            A* dbias, long long rows, int width) {
    backward<true, true>(dy, x, scale, gain, more, dx, dgain, dbias, rows, width);
}

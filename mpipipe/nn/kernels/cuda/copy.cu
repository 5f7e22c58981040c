// Copies of arrays (e0, e1, e2, e3) with any strides, in elements. Compiled for T, a dtype of the size of the elements,
// and V, elements of one word of memory; where it is above 1 it divides e3, and the last strides are 1.

// target = source. n is the number of words. Moves 2 T an element.
extern "C" __global__ void __launch_bounds__(256)
    copy(const T* source, T* target, long long n, long long e1, long long e2, long long e3, long long s0, long long s1,
         long long s2, long long s3, long long t0, long long t1, long long t2, long long t3) {
    const long long words = e3 / V;
    auto place = [&](long long i, long long a, long long b, long long c, long long d) {
        const long long rows = quotient(i, words), planes = quotient(rows, e2), cubes = quotient(planes, e1);
        return cubes * a + (planes - cubes * e1) * b + (rows - planes * e2) * c + (i - rows * words) * V * d;
    };
    each<2>(n, [&](long long i) { return load<V>(source + place(i, s0, s1, s2, s3)); },
            [&](long long i, const pack<T, V>& in) { store(target + place(i, t0, t1, t2, t3), in); });
}

// A small module of its own. Its number is changed in the PTX for each, so that nobody has seen it before.

extern "C" __global__ void second(unsigned int* out) { *out = 1234567891u; }

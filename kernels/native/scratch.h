// Memory that kernels keep between calls, so that a decode step allocates nothing.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace kvtide {

// Grow-only 64-byte aligned memory, one per thread and use.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }
    char* get(size_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = (bytes + 4095) / 4096 * 4096;
            memory_ = std::aligned_alloc(64, size_);
            if (!memory_) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return (char*)memory_;
    }

private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

template <class T>
T* take(char*& from, size_t count) {
    T* taken = reinterpret_cast<T*>(from);
    from += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
}

template <class T>
size_t room(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
}

}  // namespace kvtide

// Symbols of newer C and C++ libraries, so that an engine runs wherever torch's own wheels do: with glibc 2.28 and
// its libstdc++. `wheels.py` compiles this with the sources of an engine, and reads the versions of its symbols.
#include <cstdlib>
#include <sstream>

#if defined(__x86_64__)
#define SIGHTLINE_FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define SIGHTLINE_FIRST_GLIBC "GLIBC_2.17"
#endif

// The same functions under their first versions.
__asm__(".symver dlopen, dlopen@" SIGHTLINE_FIRST_GLIBC);
__asm__(".symver dlsym, dlsym@" SIGHTLINE_FIRST_GLIBC);
__asm__(".symver pthread_sigmask, pthread_sigmask@" SIGHTLINE_FIRST_GLIBC);
__asm__(".symver pthread_create, pthread_create@" SIGHTLINE_FIRST_GLIBC);
__asm__(".symver pthread_join, pthread_join@" SIGHTLINE_FIRST_GLIBC);

// Whether the process has one thread: then libstdc++ counts references without atomic operations. Always false here.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace std {
void __throw_bad_array_new_length() { abort(); }
template basic_ostringstream<char>::basic_ostringstream();
template basic_stringbuf<char>::__string_type basic_stringbuf<char>::str() const&;
template basic_stringbuf<char>::__string_type basic_stringbuf<char>::str() &&;
}  // namespace std

// Symbols of a newer glibc that the C++ runtime refers to, for a module that loads with an older
// one.

extern "C" {
// glibc 2.32: true while the process has one thread, which lets the C++ runtime skip atomic
// instructions. False is right at all times.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

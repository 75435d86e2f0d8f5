// Symbols of a newer glibc that the C++ runtime refers to, for a module that loads with an older
// one.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

extern "C" {
// glibc 2.32: true while the process has one thread, which lets the C++ runtime skip atomic
// instructions. False is right at all times.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// glibc 2.36: a random word, for std::random_device.
__attribute__((visibility("hidden"))) uint32_t arc4random() noexcept {
  uint32_t word;
  if (getentropy(&word, sizeof(word)) != 0) std::abort();
  return word;
}
}

// Declares launchers: functions with one signature for all platforms, defined in
// kernels/<platform>.
#ifndef QSHARD_KERNELS_LAUNCHER_H_
#define QSHARD_KERNELS_LAUNCHER_H_

#include "core/exec.h"
#include "core/format.h"

#define QSHARD_LAUNCHER(Name, ...)                 \
  Status Name(const Exec<Cpu>& exec, __VA_ARGS__); \
  Status Name(const Exec<Cuda>& exec, __VA_ARGS__)

// Declares a template of launchers with parameters `Types`, in parentheses. Name##Launcher is its
// function type, for QSHARD_INSTANTIATE_FOR.
#define QSHARD_LAUNCHER_TEMPLATE(Types, Name, ...)            \
  template <QSHARD_WITHOUT_PARENTHESES Types>                 \
  Status Name(const Exec<Cpu>& exec, __VA_ARGS__);            \
  template <QSHARD_WITHOUT_PARENTHESES Types>                 \
  Status Name(const Exec<Cuda>& exec, __VA_ARGS__);           \
  template <class Platform, QSHARD_WITHOUT_PARENTHESES Types> \
  using Name##Launcher = Status(const Exec<Platform>& exec, __VA_ARGS__)

#define QSHARD_WITHOUT_PARENTHESES(...) __VA_ARGS__

// Instantiates a launcher, as in QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, Amax).
#define QSHARD_INSTANTIATE_FOR(Platform, Name, ...) \
  template Name##Launcher<Platform, __VA_ARGS__> Name<__VA_ARGS__>;

#endif  // QSHARD_KERNELS_LAUNCHER_H_

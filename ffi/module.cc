// Python module qshard._ffi: the op table, handlers as capsules for jax.ffi, and `call` to run an
// op on DLPack tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "core/format.h"
#include "host/call.h"
#include "host/run.h"
#include "host/thread_pool.h"
#include "kernels/cpu/simd.h"
#include "schema/pattern.h"
#include "xla/ffi/api/c_api.h"

#if defined(QSHARD_WITH_CUDA)
#include <nanobind/stl/vector.h>

#include "kernels/gemm_library.h"
#endif

namespace nb = nanobind;

namespace {

template <class F>
void AddElement(nb::dict& formats) {
  nb::dict traits;
  traits["bits"] = F::kBits;
  traits["exponent_bits"] = F::kExponentBits;
  traits["mantissa_bits"] = F::kMantissaBits;
  traits["bias"] = F::kBias;
  traits["max"] = F::kMax;
  traits["nan_code"] = F::kNan;
  traits["infinity"] = F::kInfinity;
  formats[F::kName] = traits;
}

nb::dict Formats() {
  nb::dict formats;
#define QSHARD_ADD(to, F) AddElement<qshard::F>(to);
  QSHARD_FOR_EACH_CODE(QSHARD_ADD, formats)
#undef QSHARD_ADD
  nb::dict float16, nvfp4;
  float16["max"] = qshard::float16::kMax;
  formats["float16"] = float16;
  nvfp4["block"] = qshard::kNvfp4Block;
  nvfp4["small_scale_max"] = qshard::kNvfp4SmallScaleMax;
  formats["NVFP4"] = nvfp4;
  return formats;
}

nb::list SimdTargets() {
  nb::list names;
  for (auto* target = qshard::kernels::SimdTargets(); *target != nullptr; ++target)
    names.append((*target)->target);
  return names;
}

nb::dict BuildInfo() {
  nb::dict info;
  info["version"] = QSHARD_BUILD_VERSION;
  info["compiler"] = QSHARD_BUILD_COMPILER;
  info["simd"] = QSHARD_BUILD_SIMD;
  info["cuda"] = QSHARD_BUILD_CUDA;
  info["cuda_architectures"] = QSHARD_BUILD_CUDA_ARCHITECTURES;
  return info;
}

// nanobind's function that fills the module.
int (*fill)(PyObject* m) = nullptr;

// nanobind's types belong to one interpreter, and static data of this module points to them.
int FillInMainInterpreter(PyObject* m) {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return fill(m);
  PyErr_SetString(PyExc_ImportError,
                  "qshard._ffi cannot be imported in a subinterpreter; use it in the main one, or "
                  "start a process");
  return -1;
}

}  // namespace

NB_MODULE(_ffi_of_main, m) {
  qshard::kernels::Simd();  // ImportError if QSHARD_SIMD names no target of this machine
  qshard::RowOf({});        // ImportError if a row of ops.def is malformed
  m.doc() = "XLA FFI handlers of qshard, and a host that runs them on DLPack tensors.";
  // Rows live as long as the process, and Python does not collect their owners at exit.
  nb::set_leak_warnings(false);
  qshard::host::DefineRows(m);
  m.def("handlers", qshard::host::Handlers, nb::arg("platform"),
        "{op name: capsule} for \"cpu\" or \"cuda\"; empty for a platform this build lacks.");
  m.def("formats", Formats, "{name: traits} of the formats in core/format.h.");
  m.def("call", qshard::host::Call, nb::arg("op"), nb::arg("inputs"), nb::arg("outputs"),
        nb::arg("attributes"), nb::arg("refuse_negated") = false,
        "Run an op on DLPack tensors and write the outputs in place.");
  m.def("define_torch_kernels", qshard::host::DefineTorchKernels, nb::arg("library"),
        nb::arg("tensor"), "Register the ops of torch.ops.qshard with PyTorch's dispatcher.");
  m.def(
      "simd", [] { return std::string(qshard::kernels::Simd().target); },
      "SIMD target of the CPU kernels: scalar, avx2 or avx512.");
  m.def("simd_targets", SimdTargets, "SIMD targets that this machine supports, fastest last.");
  m.def("follow_num_threads", qshard::host::FollowThreadsOf, nb::arg("get_num_threads"),
        "Use the number of threads that a framework returns, unless set_num_threads was called.");
  m.def("num_threads", qshard::host::NumThreads,
        "Threads a CPU kernel may use when called from Python.");
  m.def(
      "set_num_threads",
      [](int64_t n) {
        if (n < 1)
          throw nb::value_error(
              ("set_num_threads: n (" + std::to_string(n) + ") is not positive; give 1 or more")
                  .c_str());
        qshard::host::SetNumThreads(n);
      },
      nb::arg("n"));
  m.attr("build_info") = BuildInfo();
#if defined(QSHARD_WITH_CUDA)
  m.attr("cuda_built") = true;
  m.def("set_gemm_library_paths", qshard::kernels::SetGemmLibraryPaths, nb::arg("paths"),
        "Set cuBLASLt files to try if neither the process nor the loader has the library.");
  m.def("gemm_library_version", qshard::kernels::GemmLibraryVersion,
        "Load cuBLASLt and return its version, or 0 if there is none.");
  m.def("set_grouped_gemm_library", qshard::kernels::SetGroupedGemmLibrary, nb::arg("paths"),
        nb::arg("required"),
        "Set cuBLASLt files for grouped products, if the library of others is too old or if "
        "required.");
  m.def("grouped_gemm_library_version", qshard::kernels::GroupedGemmLibraryVersion,
        "Load the cuBLASLt of grouped products and return its version, or 0 if there is none.");
  m.def("grouped_gemm_library_path", qshard::kernels::GroupedGemmLibraryPath,
        "File of the cuBLASLt that grouped products use, or an empty string.");
  m.def(
      "gemm_counts",
      [] {
        const qshard::kernels::GemmCounts counts = qshard::kernels::CountGemms();
        return nb::make_tuple(counts.hits, counts.misses, counts.searches);
      },
      "(hits, misses, searches): lookups in the GEMM plan cache, and heuristic searches.");
#else
  m.attr("cuda_built") = false;
#endif
}

extern "C" NB_EXPORT PyObject* PyInit__ffi() {
  PyObject* const definition = PyInit__ffi_of_main();
  if (definition == nullptr || fill != nullptr) return definition;
  auto* slot = reinterpret_cast<PyModuleDef*>(definition)->m_slots;
  while (slot->slot != Py_mod_exec) ++slot;
  fill = reinterpret_cast<int (*)(PyObject*)>(slot->value);
  slot->value = reinterpret_cast<void*>(FillInMainInterpreter);
  return definition;
}

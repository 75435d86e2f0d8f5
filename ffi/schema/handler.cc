#include "schema/handler.h"

#include <cstdio>
#include <exception>
#include <new>
#include <string>

namespace qshard {
namespace {

// A handler built with newer headers than the jaxlib that loads it breaks JAX's whole CPU backend.
static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR == 1,
              "qshard is built with the header in third_party; see its README");

XLA_FFI_Error* ToXla(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = code;
  return api->XLA_FFI_Error_Create(&args);
}

XLA_FFI_Error* ToXla(const XLA_FFI_Api* api, const Error& error) {
  if (!error) return nullptr;
  return ToXla(api,
               error.kind() == ErrorKind::kInternal ? XLA_FFI_Error_Code_INTERNAL
                                                    : XLA_FFI_Error_Code_INVALID_ARGUMENT,
               error.text().c_str());
}

void Destroy(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args{};
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.error = error;
  api->XLA_FFI_Error_Destroy(&args);
}

XLA_FFI_Error* CheckSize(const XLA_FFI_Api* api, const char* what, bool fits) {
  if (fits) return nullptr;
  const std::string message = std::string("qshard: ") + what +
                              " has another layout than in the header that qshard was built " +
                              "with; check the versions of jax and qshard";
  return ToXla(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, message.c_str());
}

template <class Platform>
constexpr XLA_FFI_Handler_Traits kTraits = 0;
// A handler enqueues the same launches for the same shapes and nothing else, so XLA may record it
// in a command buffer.
template <>
constexpr XLA_FFI_Handler_Traits kTraits<Cuda> = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;

template <class Platform>
XLA_FFI_Error* AnswerMetadata(const XLA_FFI_Api* api, XLA_FFI_Metadata_Extension* extension) {
  XLA_FFI_Metadata* metadata = extension->metadata;
  if (XLA_FFI_Error* error = CheckSize(
          api, "XLA_FFI_Metadata",
          extension->extension_base.struct_size >= XLA_FFI_Metadata_Extension_STRUCT_SIZE &&
              metadata->struct_size >= XLA_FFI_Metadata_STRUCT_SIZE))
    return error;
  metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                           XLA_FFI_API_MINOR};
  metadata->traits = kTraits<Platform>;
  metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
  return nullptr;
}

// --- contexts ---

XLA_FFI_Error* GetExec(const XLA_FFI_CallFrame& frame, Exec<Cpu>* exec) {
  exec->api = frame.api;
  exec->context = frame.ctx;
  exec->schedule = [](const Exec<Cpu>& e, void (*task)(void*), void* data) noexcept {
    auto* api = static_cast<const XLA_FFI_Api*>(e.api);
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = static_cast<XLA_FFI_ExecutionContext*>(e.context);
    args.task = task;
    args.data = data;
    try {
      XLA_FFI_Error* const error = api->XLA_FFI_ThreadPool_Schedule(&args);
      if (error == nullptr) return ScheduleResult::kRuns;
      Destroy(api, error);
      return ScheduleResult::kRefused;
    } catch (...) {  // XLA allocates the task
      return ScheduleResult::kUnknown;
    }
  };
  XLA_FFI_ThreadPool_NumThreads_Args args{};
  args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  args.num_threads = &exec->num_threads;
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_ThreadPool_NumThreads(&args)) {
    Destroy(frame.api, error);
    exec->num_threads = 1;
  }
  return nullptr;
}

XLA_FFI_Error* GetExec(const XLA_FFI_CallFrame& frame, Exec<Cuda>* exec) {
  XLA_FFI_Stream_Get_Args args{};
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  XLA_FFI_Error* error = frame.api->XLA_FFI_Stream_Get(&args);
  exec->stream = static_cast<CUstream_st*>(args.stream);
  return error;
}

bool AllEmpty(Buffers rets) {
  for (int64_t i = 0; i < rets.size; ++i)
    if (Elements(rets[i]) > 0) return false;
  return true;
}

template <class Platform>
XLA_FFI_Error* Decode(XLA_FFI_CallFrame* frame, const Row& row,
                      Error (*run)(const Call<Platform>& call)) {
  // These structs are members of the frame, so another size would move the members after them.
  if (XLA_FFI_Error* error = CheckSize(frame->api, "XLA_FFI_CallFrame",
                                       frame->args.struct_size == XLA_FFI_Args_STRUCT_SIZE &&
                                           frame->rets.struct_size == XLA_FFI_Rets_STRUCT_SIZE &&
                                           frame->attrs.struct_size == XLA_FFI_Attrs_STRUCT_SIZE))
    return error;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE)
    return ToXla(frame->api, ValueError(row.name, ": is called at a stage that is not execution"));
  const auto buffers = [](void** data, int64_t size) {
    return Buffers{reinterpret_cast<Buffer* const*>(data), size};
  };
  for (int64_t i = 0; i < frame->args.size; ++i)
    if (frame->args.types[i] != XLA_FFI_ArgType_BUFFER)
      return ToXla(frame->api, ValueError(row.name, ": operand ", i, " is not a buffer"));
  for (int64_t i = 0; i < frame->rets.size; ++i)
    if (frame->rets.types[i] != XLA_FFI_RetType_BUFFER)
      return ToXla(frame->api, ValueError(row.name, ": result ", i, " is not a buffer"));
  const Buffers args = buffers(frame->args.args, frame->args.size);
  const Buffers rets = buffers(frame->rets.rets, frame->rets.size);
  Binding binding(row);
  if (Error error = binding.Bind(frame->attrs, args, &rets)) return ToXla(frame->api, error);
  if (AllEmpty(rets)) return nullptr;
  Exec<Platform> exec;
  if (XLA_FFI_Error* error = GetExec(*frame, &exec)) return error;
  return ToXla(frame->api, run(Call<Platform>{exec, binding, args, rets}));
}

// Runs a call or answers a metadata query. A newer jaxlib may append fields to its structs.
template <class Platform>
XLA_FFI_Error* Answer(XLA_FFI_CallFrame* frame, Op op, Error (*run)(const Call<Platform>& call)) {
  if (XLA_FFI_Error* error = CheckSize(frame->api, "XLA_FFI_CallFrame",
                                       frame->struct_size >= XLA_FFI_CallFrame_STRUCT_SIZE))
    return error;
  for (XLA_FFI_Extension_Base* e = frame->extension_start; e != nullptr; e = e->next)
    if (e->type == XLA_FFI_Extension_Metadata)
      return AnswerMetadata<Platform>(frame->api, reinterpret_cast<XLA_FFI_Metadata_Extension*>(e));
  return Decode(frame, RowOf(op), run);
}

}  // namespace

// Formats messages on the stack, because an allocation may have failed.
template <class Platform>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame, Op op, const char* name,
                      Error (*run)(const Call<Platform>& call)) {
  char message[256];
  try {
    return Answer(frame, op, run);
  } catch (const std::bad_alloc&) {
    std::snprintf(message, sizeof(message),
                  "%s: there is no memory left to work in; free some, or use fewer threads", name);
    return ToXla(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, message);
  } catch (const std::exception& e) {
    std::snprintf(message, sizeof(message), "%s: %s", name, e.what());
  } catch (...) {
    std::snprintf(message, sizeof(message), "%s: an exception of an unknown type", name);
  }
  return ToXla(frame->api, XLA_FFI_Error_Code_INTERNAL, message);
}

template XLA_FFI_Error* Handle<Cpu>(XLA_FFI_CallFrame*, Op, const char*,
                                    Error (*)(const Call<Cpu>&));
template XLA_FFI_Error* Handle<Cuda>(XLA_FFI_CallFrame*, Op, const char*,
                                     Error (*)(const Call<Cuda>&));

}  // namespace qshard

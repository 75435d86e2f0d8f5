#include "host/api.h"

#include "host/thread_pool.h"

namespace qshard::host {
namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->errc, args->message};
}
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->stream;
  return nullptr;
}
XLA_FFI_Error* ScheduleTask(XLA_FFI_ThreadPool_Schedule_Args* args) {
  Schedule(args->task, args->data);
  return nullptr;
}
XLA_FFI_Error* GetNumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = NumThreads();
  return nullptr;
}

}  // namespace

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api a{};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
    a.XLA_FFI_Error_Create = CreateError;
    a.XLA_FFI_Error_Destroy = DestroyError;
    a.XLA_FFI_Stream_Get = GetStream;
    a.XLA_FFI_ThreadPool_Schedule = ScheduleTask;
    a.XLA_FFI_ThreadPool_NumThreads = GetNumThreads;
    return a;
  }();
  return &api;
}

}  // namespace qshard::host

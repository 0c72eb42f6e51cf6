// What is called of Python and of PyTorch's bindings: their own headers are not always there.
#ifndef LOWTIDE_PYTHON_H
#define LOWTIDE_PYTHON_H

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>

#include <cstddef>

struct _object;
using PyObject = _object;
PyObject* THPStorage_Wrap(c10::Storage storage);
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
extern "C" {
struct MethodDef {  // PyMethodDef
  const char* name;
  PyObject* (*call)(PyObject*, PyObject*);
  int flags;
  const char* doc;
};
extern PyObject _Py_NoneStruct;
int PyGILState_Ensure();
void PyGILState_Release(int);
PyObject* PyCFunction_NewEx(MethodDef*, PyObject*, PyObject*);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PyObject* PyObject_Type(PyObject*);
PyObject* PyTuple_New(std::ptrdiff_t);
int PyTuple_SetItem(PyObject*, std::ptrdiff_t, PyObject*);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyLong_FromVoidPtr(void*);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyUnicode_FromString(const char*);
std::ptrdiff_t PyDict_Size(PyObject*);
int PyDict_Contains(PyObject*, PyObject*);
PyObject* PyWeakref_NewRef(PyObject*, PyObject*);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
int PyCapsule_IsValid(PyObject*, const char*);
void* PyCapsule_GetPointer(PyObject*, const char*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
extern PyObject* PyExc_RuntimeError;
void PyErr_SetString(PyObject*, const char*);
void PyErr_Clear();
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
void PyErr_WriteUnraisable(PyObject*);
int Py_AddPendingCall(int (*)(void*), void*);
}

namespace lowtide {

// Python's lock, held by this thread as long as it lives.
class Locked {
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  int state_;
};

}  // namespace lowtide
#endif

"""Inductor's C++ kernels, compiled many at a time.

Of what a C++ compiler does for one kernel, most is for the headers and for Python's bindings: one
took 0.65 s, nine in one file 0.76 s (gcc, with headers precompiled, November 2026).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@contextlib.contextmanager
def kernels_together() -> Iterator[Kernels]:
    """Compile at the end all C++ kernels that Inductor wants in here.

    Each kernel is then where Inductor looks for it, in this process and in others.  Inside of
    another such context, that is at the end of the outer one.

    Raises: what the C++ compiler says of a kernel that it cannot compile.
    """
    around = _TOGETHER.get()
    if around is not None:
        yield around
        return
    kernels = Kernels()
    if sys.platform != "win32":
        _hand_over_kernels()
    token = _TOGETHER.set(kernels)
    try:
        yield kernels
    finally:
        _TOGETHER.reset(token)
    kernels.compile()


_TOGETHER: contextvars.ContextVar[Kernels | None] = contextvars.ContextVar(
    "kernels together", default=None
)


@functools.cache
def _hand_over_kernels() -> None:
    """Have Inductor hand over the kernels of its modules, where a context above is open.

    Private: two methods of ``AsyncCompile``, alike from 2.11 to 2.15.
    """
    from torch._inductor.async_compile import AsyncCompile

    cpp_pybinding, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def later(self, argtypes, source_code):
        kernels = _TOGETHER.get()
        if kernels is None:
            return cpp_pybinding(self, argtypes, source_code)
        return kernels.later(argtypes, source_code)

    def wait_for_others(self, scope):
        kernels = _TOGETHER.get()
        if kernels is not None:
            kernels.scopes.append(scope)
        return wait(self, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = later, wait_for_others


class _Later:
    """Stands for a kernel in a module of Inductor's; called, it is compiled if it is not yet."""

    def __init__(self, load: Callable[[], Callable[..., None]]) -> None:
        self.load = load

    def __call__(self, *arguments: Any) -> None:
        self.load()(*arguments)


class Kernels:
    """The kernels that Inductor wants in one context, and the modules that they are wanted in.

    They are compiled in as many files as are compiled ``at_once``; then what is to be done
    ``afterwards`` is done.
    """

    def __init__(self) -> None:
        self.at_once = 1
        self.afterwards: list[Callable[[], object]] = []
        self.scopes: list[dict[str, Any]] = []
        self._builds: list[Callable[[], None]] = []

    def later(self, argtypes: Sequence[str], source_code: str) -> _Later:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        load = CppPythonBindingsCodeCache.load_pybinding_async
        return _Later(load(argtypes, source_code, submit_fn=self._submit))

    def _submit(self, build: Callable[[], None]) -> Future[None]:
        """Take what compiles one kernel, unless it is there; Inductor waits for nothing."""
        self._builds.append(build)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def compile(self) -> None:
        """Compile all of them, and put them in their modules."""
        alike: dict[tuple, list[_Source]] = defaultdict(list)
        jobs: list[Callable[[], None]] = []
        for build in self._builds:
            source = _source_of(build)
            if source is None:
                jobs.append(build)
            else:
                alike[source.options].append(source)
        for sources in alike.values():
            sources.sort(key=lambda one: len(one.body), reverse=True)
            parts = min(self.at_once, len(sources))
            jobs += [functools.partial(_compile, sources[part::parts]) for part in range(parts)]
        with ThreadPoolExecutor(self.at_once) as pool:
            for future in [pool.submit(job) for job in jobs]:
                # What has failed is compiled by itself below, and its error is for that one.
                with contextlib.suppress(Exception):
                    future.result()
        for scope in self.scopes:
            for name, value in list(scope.items()):
                if isinstance(value, _Later):
                    scope[name] = value.load()
        for do in self.afterwards:
            do()


@dataclass(frozen=True)
class _Source:
    """The C++ of one kernel that can stand in one file with others.

    ``key`` is Inductor's name for it and ``target`` the library that Inductor looks for.  Kernels
    may stand together whose ``options`` are equal: command line and headers.
    """

    key: str
    target: str
    body: str
    options: tuple[str, str]
    build_option: Any


def _source_of(build: Callable[[], None]) -> _Source | None:
    """Return what compiles a kernel, read again; None if that is not of the form that is known.

    Private: ``_worker_compile_cpp``, its ``CppBuilder`` and the text of kernels, alike from 2.11 to
    2.15.
    """
    try:
        (builder,) = build.args[1]  # type: ignore[attr-defined]
        target = builder.get_target_file_path()
        path = f"{os.path.splitext(target)[0]}.cpp"
        with open(path, encoding="utf-8") as file:
            text = file.read()
        command = builder.get_command_line().replace(path, "").replace(target, "")
        found = _KERNEL.fullmatch(text)
        if found is None or _ALONE.search(found["body"]):
            return None
        key = os.path.basename(path).partition(".")[0]
        options = command, found["headers"]
        return _Source(key, target, found["body"], options, builder._build_option)
    except Exception:
        return None


_KERNEL = re.compile(
    r"\s*(?P<headers>(?:#include [^\n]*\n\s*)+)"
    r'extern "C"\s+void\s+kernel(?P<body>\(.*)// Python bindings to call kernel\(\):.*',
    re.DOTALL,
)
_ALONE = re.compile(r'extern "C"|^\s*#(?!pragma)|\bkernel\b', re.MULTILINE)
"""Finds what keeps a kernel from standing with others: macros, other functions of its name."""


def _compile(sources: Sequence[_Source]) -> None:
    """Compile kernels in one file, and give each its library: one and the same.

    It is another file until it is whole, as a process may be killed while it is written.
    """
    from torch._inductor.codecache import cache_dir
    from torch._inductor.cpp_builder import CppBuilder

    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        path = os.path.join(folder, "kernels.cpp")
        with open(path, "w", encoding="utf-8") as file:
            file.write(_text(sources))
        builder = CppBuilder("kernels", path, sources[0].build_option, folder)
        builder.build()
        for source in sources:
            place = os.path.join(folder, f"{source.key}.so")
            try:
                os.link(builder.get_target_file_path(), place)
            except OSError:  # a file system without links
                shutil.copy(builder.get_target_file_path(), place)
            os.replace(place, source.target)


def _text(sources: Sequence[_Source]) -> str:
    """Return C++ of kernels, and of a Python module that has the one that its own name says."""
    kernels = "\n".join(
        f'namespace of_{one.key} {{\nextern "C" void kernel_{one.key}{one.body}\n}}'
        for one in sources
    )
    table = ",\n".join(
        f'    {{"{one.key}", "kernel_{one.key}", '
        f'{{{{"kernel", called<of_{one.key}::kernel_{one.key}>(), METH_FASTCALL, ""}}, {{}}}}}}'
        for one in sources
    )
    _, headers = sources[0].options
    return f"{headers}\n{kernels}\n{_BINDINGS.replace('KERNELS', table)}"


_BINDINGS = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

namespace {

void* (*memory_of)(PyObject*);

template <typename T> T taken(PyObject* value) {
    T result;
    if constexpr (std::is_pointer_v<T>) {
        result = static_cast<T>(memory_of(value));
    } else if constexpr (std::is_floating_point_v<T>) {
        result = static_cast<T>(PyFloat_AsDouble(value));
    } else {
        static_assert(std::is_integral_v<T>, "a tensor's memory, or a number");
        result = static_cast<T>(PyLong_AsLongLong(value));
    }
    if (PyErr_Occurred()) throw std::invalid_argument("");
    return result;
}

template <typename... T, size_t... at>
void run(void (*kernel)(T...), PyObject* const* given, std::index_sequence<at...>) {
    std::apply(kernel, std::tuple<T...>{taken<T>(given[at])...});
}

template <typename... T>
PyObject* run(void (*kernel)(T...), PyObject* const* given, Py_ssize_t count) {
    try {
        if (count != sizeof...(T)) throw std::invalid_argument("another number of arguments");
        run(kernel, given, std::index_sequence_for<T...>{});
    } catch (const std::exception& error) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    Py_RETURN_NONE;
}

template <auto kernel> PyCFunction called() {
    PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t) =
        [](PyObject*, PyObject* const* given, Py_ssize_t count) {
            return run(kernel, given, count);
        };
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

struct Known {
    const char* key;
    const char* symbol;
    PyMethodDef methods[2];
};

Known known[] = {
KERNELS
};

PyObject* create(PyObject* spec, PyModuleDef*) {
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (address != nullptr) {
        auto number = static_cast<uintptr_t>(std::strtoull(address, nullptr, 10));
        memory_of = reinterpret_cast<decltype(memory_of)>(number);
    }
    PyObject* name = PyObject_GetAttrString(spec, "name");
    const char* text = name != nullptr ? PyUnicode_AsUTF8(name) : nullptr;
    PyObject* module = nullptr;
    for (auto& one : known) {
        auto length = std::strlen(one.key);
        if (text == nullptr || std::strncmp(text, one.key, length) || text[length] != '.') continue;
        module = PyModule_NewObject(name);
        if (module == nullptr) break;
        if (PyModule_AddFunctions(module, one.methods) ||
            PyModule_AddStringConstant(module, "symbol", one.symbol)) {
            Py_CLEAR(module);
        }
        break;
    }
    Py_XDECREF(name);
    if ((module == nullptr || memory_of == nullptr) && !PyErr_Occurred()) {
        Py_CLEAR(module);
        PyErr_SetString(PyExc_ImportError, "no such kernel, or no way to the memory of tensors");
    }
    return module;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_create, reinterpret_cast<void*>(create)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_kernel() { return PyModuleDef_Init(&definition); }
"""

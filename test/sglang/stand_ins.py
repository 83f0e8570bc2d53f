"""Import-time stand-ins for packages that SGLang's model files import and that no CPU test calls."""

import importlib.abc
import importlib.machinery
import sys
import types

PACKAGES = (
    "torchvision",
    "sgl_kernel",
    "flash_mla",
    "xgrammar",
    "soundfile",
    "decord",
    "IPython",
    "tilelang",
    "torch_c_dlpack_ext",
)


class _AnyAttribute(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Placeholder(metaclass=_AnyAttribute):
    """Whatever such a package would have offered: it can be subclassed, decorated with and looked into, not used."""

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder()

    def __call__(self, *args, **kwargs):
        return self


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        placeholder = _AnyAttribute(name, (_Placeholder,), {"__module__": self.__name__})
        setattr(self, name, placeholder)
        return placeholder


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for every module of `PACKAGES` that is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def install() -> None:
    sys.meta_path.append(StandIns())

"""Modules that torch and TorchRec import, or ask a trivial question, and that training does not use: loaded at first
use.

torch's compiler (`torch._dynamo`, sympy), DTensor, FSDP and tensordict are more than half of what `import torchrec`
costs. TorchRec needs classes of them for `isinstance`, and functions that do nothing outside of a compiler. Such a
module is created here without running its code. To TorchRec it answers with a stand-in for the names in `CLASSES` and
`ANSWERS`. Any other name, any other importer, a submodule, or a real use of a stand-in runs the code in place, as a
plain import would have: `torch.compile`, and a user's own model with DTensors, work as ever.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType, new_class
from typing import Any

_LOADING = threading.RLock()
_DISABLED: list[Any] = []
"""Functions that `torch._dynamo.disable` returned as they are, while there was no compiler to keep out of them."""


class LazyModule(ModuleType):
    """A module whose code has not run."""

    def __getattr__(self, name: str) -> Any:
        """Answer for a name that is not there yet, or load the module."""
        if name == "__path__":  # how `from module import name` asks whether it is a package
            raise AttributeError(name)
        importer = _importer(sys._getframe(1))
        if type(self) is LazyModule and importer in ("torchrec", "fbgemm_gpu", "torch"):
            if importer != "torch" and name in CLASSES.get(self.__name__, ()):
                return LazyClass(name, (), {"home": CLASSES[self.__name__][name]})
            if name in ANSWERS.get(self.__name__, ()):
                return ANSWERS[self.__name__][name](self.__name__, name)
        load(self)
        return getattr(self, name)


def _importer(frame: FrameType | None) -> str:
    """Return the top-level package of the code that asks, through the import system or not."""
    while frame:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in ("importlib", "_frozen_importlib"):
            return name
        frame = frame.f_back
    return ""


class LazyClass(type):
    """Metaclass of a stand-in for the class of that name in `home`. Until `home` is loaded it has no instances."""

    home: str

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if bases:  # a subclass of a stand-in is one of the class itself
            real = tuple(base._real() if isinstance(base, LazyClass) else base for base in bases)
            return new_class(name, real, exec_body=lambda body: body.update(namespace))
        return super().__new__(cls, name, bases, namespace)

    def __instancecheck__(cls, instance: object) -> bool:
        return is_loaded(cls.home) and isinstance(instance, cls._real())

    def __subclasscheck__(cls, subclass: type) -> bool:
        return is_loaded(cls.home) and issubclass(subclass, cls._real())

    def __call__(cls, *args: Any, **named: Any) -> Any:
        return cls._real()(*args, **named)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real(), name)

    def _real(cls) -> Any:
        module = importlib.import_module(cls.home)
        load(module)
        return vars(module).get(cls.__name__, ())  # () while its module is still being loaded


def is_loaded(name: str) -> bool:
    return name in sys.modules and not isinstance(sys.modules[name], LazyModule)


def load(module: ModuleType) -> None:
    """Run the code of a lazy module, after that of its package."""
    with _LOADING:
        package = sys.modules.get(module.__name__.rpartition(".")[0])
        if isinstance(package, LazyModule):
            load(package)
        if isinstance(module, LazyModule):
            module.__class__ = ModuleType  # type: ignore[assignment]
            while module.__name__ == "torch._dynamo" and _DISABLED:  # now to be asked for again
                vars(_DISABLED.pop()).pop("__dynamo_disable", None)
            assert module.__spec__
            assert module.__spec__.loader
            module.__spec__.loader.exec_module(module)


class LazyLoader(Loader):
    """Creates a module, and leaves its code to `load`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__
        module.__spec__.loader = module.__loader__ = self._loader
        module.__class__ = LazyModule


class LoadedLoader(Loader):
    """Loads a submodule that its package imported itself when it was loaded for this submodule."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class LazyFinder(MetaPathFinder):
    """Finds the modules of `LAZY`, and loads those whose submodules are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in LAZY:
            spec = PathFinder.find_spec(name, path)
            if spec and spec.loader:
                spec.loader = LazyLoader(spec.loader)
            return spec
        package = sys.modules.get(name.rpartition(".")[0])
        if isinstance(package, LazyModule) and name not in INDEPENDENT:
            load(package)
            if name in sys.modules:
                return ModuleSpec(name, LoadedLoader(sys.modules[name]))
        return None


def install() -> None:
    """Install the finder, before torch is imported; what is imported already stays as it is."""
    if not any(isinstance(finder, LazyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LazyFinder())


def _device_mesh(module: str, name: str) -> Any:
    """Return `DeviceMesh` from where it is defined; DTensor's package re-exports it."""
    return getattr(importlib.import_module("torch.distributed.device_mesh"), name)


def _submodule(module: str, name: str) -> ModuleType:
    return importlib.import_module(f"{module}.{name}")


def _apply_optimizer(module: str, name: str) -> Any:
    """Import one submodule: TorchScript compiles the package's other optimizers as they are imported."""
    return getattr(_submodule(module, name.lstrip("_")), name)


def _if_plain(answer: Callable[[Any], bool]) -> Callable[[str, str], Any]:
    """Return a stand-in that gives `answer` for a plain bool or int; symbols are for the module itself."""
    def stand_in(module: str, name: str) -> Callable[..., Any]:
        def ask(value: Any, *args: Any, **named: Any) -> Any:
            if type(value) in (bool, int):
                return answer(value)
            load(sys.modules[module])
            return vars(sys.modules[module])[name](value, *args, **named)

        return ask

    return stand_in


def _disable(module: str, name: str) -> Callable[..., Any]:
    """Return a stand-in for `torch._disable_dynamo`, which keeps the answer with the function; `load` takes it back."""
    def disable(function: Any, recursive: bool, *, wrapping: bool) -> Any:
        _DISABLED.append(function)
        return function

    return disable


_DTENSOR = dict.fromkeys(("DTensor", "Placement", "Replicate", "Shard"), "torch.distributed.tensor")

CLASSES: Mapping[str, Mapping[str, str]] = {
    "tensordict": {"TensorDict": "tensordict"},
    "torch.distributed._composable.fsdp": {},
    "torch.distributed._composable.fsdp.fully_shard": {"FSDPModule": "torch.distributed.fsdp"},
    "torch.distributed._tensor": _DTENSOR,
    "torch.distributed._tensor.api": _DTENSOR,
    "torch.distributed._tensor.placement_types": _DTENSOR,
    "torch.distributed.fsdp": {"FullyShardedDataParallel": "torch.distributed.fsdp"},
    "torch.distributed.tensor": _DTENSOR,
    "torchrec.distributed.shards_wrapper": {"LocalShardsWrapper": "torchrec.distributed.shards_wrapper"},
}
"""Classes by the module that TorchRec imports them from, each with the module that has it."""
ANSWERS: Mapping[str, Mapping[str, Callable[[str, str], Any]]] = {
    "torch._dynamo": {"disable": _disable, "graph_break": lambda *_: lambda: None, "config": _submodule,
                      "utils": _submodule},
    "torch._dynamo.utils": {"get_optimize_ddp_mode": lambda *_: lambda: "ddp_optimizer"},
    "torch.distributed._tensor": {"DeviceMesh": _device_mesh},
    "torch.distributed.optim": {"_apply_optimizer_in_backward": _apply_optimizer},
    "torch.distributed.tensor": {"DeviceMesh": _device_mesh},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), _if_plain(bool)),
        "is_nested_int": _if_plain(lambda _: False),
    },
}
"""What else a module answers, to torch itself too, and as it would with the settings that it starts with."""
INDEPENDENT = ("torch._dynamo.config", "torch.distributed.optim.apply_optimizer_in_backward")
"""Submodules that use nothing of their package, which need not be loaded for them."""
LAZY = CLASSES.keys() | ANSWERS.keys()

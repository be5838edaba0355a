"""If this fails, linumpy cannot be imported where a GPU package is missing."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GPU_PACKAGES = ("cupy", "cupyx", "kvikio", "nvidia", "warp", "cuda", "rmm", "torch")
#: Packages of the extras, and peers of benchmarks.
OPTIONAL = {
    "cucim", "dask", "distributed", "ipywidgets", "nerfacc", "nibabel", "obstore", "SimpleITK", "skimage",
    "tensorstore", "tifffile", "trimesh", "vtk", "zarrs",
}  # fmt: skip
#: Modules that another package loads, which they import; and kernels of Warp, which are imported inside functions.
LOADED_BY = {
    "linumpy.voxel.backends.warp_kernels": "warp",
    "linumpy.voxel.backends.warp_mesh_kernels": "warp",
    "linumpy.interop.monai": "monai",
    "linumpy.interop.nnunet": "nnunetv2",
    "linumpy.interop.xarray_backend": "xarray",
}
FOLDERS = ("linumpy", "scripts", "benchmarks")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def module_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def top_level(body):
    """Statements that run on import: all but those inside functions, and those for type checkers."""
    for node in body:
        yield node
        only_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not only_for_types:
            yield from top_level(ast.iter_child_nodes(node))


def test_no_gpu_package_and_no_optional_one_at_the_top():
    found = {}
    for file in FILES:
        names = set()
        for node in top_level(ast.parse(file.read_text(encoding="utf-8")).body):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
        found[module_of(file)] = (names - {LOADED_BY.get(module_of(file))}) & (set(GPU_PACKAGES) | OPTIONAL)
    assert {module: names for module, names in found.items() if names} == {}


def test_everything_imports_where_they_are_blocked():
    modules = [module_of(file) for file in FILES if not file.is_relative_to(ROOT / "scripts")]
    blocked = {name for name, package in LOADED_BY.items() if package in GPU_PACKAGES}
    modules = [name for name in modules if name not in LOADED_BY or importlib.util.find_spec(LOADED_BY[name])]
    modules = [name for name in modules if name not in blocked]
    code = (
        "import importlib, runpy, sys\n"
        f"for name in {GPU_PACKAGES!r}: sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"for path in {[str(f) for f in FILES if f.parent.name == 'scripts']!r}: runpy.run_path(path, run_name='x')\n"
        "print('all of them')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "all of them\n", result.stderr


def test_types_are_shipped():
    assert (ROOT / "linumpy/py.typed").is_file()
    assert 'wheel.packages = ["linumpy", ' in (ROOT / "pyproject.toml").read_text(), "all files of it are shipped"


def test_the_package_itself_imports_nothing_heavy():
    """The main names are there without an import of their own, and cost nothing until they are used."""
    code = (
        "import sys, linumpy\n"
        "heavy = {'numpy', 'zarr', 'scipy', 'dask', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(linumpy.__all__) <= set(dir(linumpy))\n"
        "for name in linumpy.__all__: assert callable(getattr(linumpy, name)), name\n"
        "try: linumpy.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "module 'linumpy' has no attribute 'nothing'\n", result.stderr


def test_read_zarr_imports_no_more_than_a_read_needs():
    code = (
        "import sys; from linumpy import read_zarr\n"
        "print(sorted({'scipy.ndimage', 'scipy.sparse', 'dask', 'matplotlib', 'PIL', 'tqdm'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "[]\n", result.stderr

"""The notebook runs from top to bottom, on the demo pair."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "bench" / "chat.ipynb"


def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in {"MODEL": "demo", "MLX_DISABLE_COMPILE": 1, "JUPYTER_PLATFORM_DIRS": 1, "IPYTHONDIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    printed = lambda cell: "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)
    assert "Pair(" in printed(cells[0]) and printed(cells[1]).strip()
    assert "reused_tokens" in printed(cells[2])
    assert "['user', 'assistant']" in printed(cells[3]) and "length" in printed(cells[4])

"""Every example runs and comes to the result it promises."""

from pathlib import Path

import pytest

from examples import accelerate_model, compile_and_export, edit_siren, own_architecture, predict_accuracy, ragged_batch


def test_every_example_is_tested():
    found = {path.stem for path in (Path(__file__).parent.parent / "examples").glob("*.py")}
    tested = {
        "accelerate_model",
        "compile_and_export",
        "edit_siren",
        "own_architecture",
        "predict_accuracy",
        "ragged_batch",
    }
    assert found == tested | {"__init__", "authors_layers", "shared"}


def test_predict_accuracy(tmp_path, capsys):
    with pytest.raises(SystemExit):
        predict_accuracy.main([str(tmp_path)])
    assert "accuracies.csv is missing: a row `file,accuracy` for each network" in capsys.readouterr().err
    assert predict_accuracy.main([str(tmp_path), "--make", "200", "--epochs", "15"]) > 0.4


def test_accelerate_model(capsys):
    assert 0 < accelerate_model.main() < 1e-5
    assert "4 replaced, 1 left" in capsys.readouterr().out


def test_edit_siren():
    assert edit_siren.main(["--networks", "80", "--steps", "100"]) < 0.7


def test_own_architecture():
    assert own_architecture.main() > 0.8


@pytest.mark.filterwarnings("ignore")
def test_compile_and_export():
    assert compile_and_export.main(["--backend", "aot_eager"]) < 1e-5


def test_ragged_batch():
    assert ragged_batch.main() < 1e-5

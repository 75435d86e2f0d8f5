"""Options of the command that are given twice: an error, unless the option is for several values."""

import pytest

pytest.importorskip("rich")
pytest.importorskip("safetensors")
click, app = pytest.importorskip("click"), pytest.importorskip("qshard._cli.app")

OPTIONS = [
    (name, option)
    for name, command in app.group.commands.items()
    for option in command.params
    if isinstance(option, click.Option)
]
SEVERAL = {("report", "--formats"), ("report", "--layers"), ("convert", "--format"), ("convert", "--keep")}
SEVERAL |= {("bench", "--formats")}


def values(option):
    """Two that the option takes."""
    if option.is_flag:
        return (), ()
    if isinstance(option.type, click.Choice):
        return tuple((choice,) for choice in option.type.choices[:2])
    return ("1",), ("2",)


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=lambda each: getattr(each, "name", each))
def test_an_option_that_is_given_twice(name, option, capsys, monkeypatch):
    """In one spelling or the other, with the same value or another one; the command itself does not run."""
    monkeypatch.setattr(app.group.commands[name], "callback", lambda **given: print(given[option.name]))
    others = {"report": ["in"], "convert": ["in", "out"]}.get(name, [])
    first, second = values(option)
    (flag,) = option.opts
    assert app.run([name, *others, flag, *first]) == 0
    for last in (first, second):
        capsys.readouterr()
        status = app.run([name, *others, flag, *first, flag, *last])
        out, err = capsys.readouterr()
        if (name, flag) in SEVERAL:
            assert (status, out, err) == (0, f"{(*first, *last)}\n", "")
        else:
            said = f"qshard: {flag} is given 2 times; use it once; qshard {name} --help lists all options\n"
            assert (status, out, err) == (2, "", said)


def test_help_may_be_asked_twice(capsys):
    assert app.run(["report", "--help", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: ")

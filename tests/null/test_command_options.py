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
def test_an_option_that_is_given_twice(name, option, capsys):
    """In one spelling or the other, with the same value or another one; the command itself does not run."""
    others = {"report": ["in"], "convert": ["in", "out"]}.get(name, [])
    first, second = values(option)
    (flag,) = option.opts
    command = app.group.commands[name]
    command.make_context(name, [*others, flag, *first])
    for last in (first, second):
        given = [*others, flag, *first, flag, *last]
        if (name, flag) in SEVERAL:
            assert command.make_context(name, given).params[option.name] == (*first, *last)
        else:
            said = f"qshard: {flag} is given 2 times; use it once; qshard {name} --help lists all options\n"
            assert (app.run([name, *given]), *capsys.readouterr()) == (2, "", said)


def test_help_may_be_asked_twice(capsys):
    assert app.run(["report", "--help", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: ")

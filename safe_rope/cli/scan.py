"""`safe-rope scan`: find and fix source whose positions a lower dtype can round."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import click

from safe_rope._base.files import write_atomically
from safe_rope.errors import ConfigError, SafeRopeError
from safe_rope.scan import (
    DEFAULT_FILE,
    FORMATS,
    LISTS,
    Baseline,
    Cache,
    Diagnostic,
    FileResult,
    Hit,
    Selection,
    UnreadableError,
    check_rules,
    diff,
    fix_source,
    limited,
    load_settings,
    open_cache,
    printable,
    scan_files,
    scan_source,
    session,
    table,
)

SEVERITIES = ("error", "warning", "note")


class _Failure(click.ClickException):
    exit_code = 2


def _names(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for item in value for name in item.split(",") if name.strip())


def _listed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that are lists of the settings."""
    for name, text in reversed(LISTS.items()):
        metavar = "PATTERNS" if name.endswith("exclude") else "RULES"
        command = click.option(f"--{name}", multiple=True, callback=_names, metavar=metavar, help=text)(
            command
        )
    return command


@click.command("scan")
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--package", "packages", multiple=True, metavar="NAME", help="Scan an installed package.")
@click.option(
    "--format",
    "--output-format",
    "style",
    type=click.Choice(list(FORMATS)),
    default="text",
    show_default=True,
)
@click.option("--output-file", "-o", metavar="FILE", help="Write the report there instead of stdout.")
@_listed
@click.option("--config", metavar="FILE", help="Read this pyproject.toml instead of the nearest.")
@click.option("--isolated", is_flag=True, help="Read no pyproject.toml.")
@click.option("--show-settings", is_flag=True, help="Print what counts for the first path; scan nothing.")
@click.option("--show-files", is_flag=True, help="Print the files that would be scanned; scan nothing.")
@click.option("--fix", is_flag=True, help="Write the safe fixes into the files.")
@click.option("--fix-only", is_flag=True, help="Like --fix, and report nothing of what is left.")
@click.option("--exit-non-zero-on-fix", is_flag=True, help="Exit 1 if anything was fixed.")
@click.option("--add-noqa", is_flag=True, help="Write a comment that silences it after each finding.")
@click.option(
    "--unsafe-fixes", is_flag=True, help="With --fix or --diff: also fixes that can change results."
)
@click.option("--diff", is_flag=True, help="Print what --fix would change; write nothing.")
@click.option("--baseline", metavar="FILE", help="Report only findings that FILE does not hold.")
@click.option("--write-baseline", is_flag=True, help=f"Record the findings in FILE ({DEFAULT_FILE}).")
@click.option("--statistics", is_flag=True, help="Count findings by rule and by identical code.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), metavar="N", help="Processes (default: the cores).")
@click.option("--no-cache", is_flag=True, help="Neither read nor write the cache.")
@click.option("--stdin-filename", metavar="NAME", help="What to call the source that `-` reads from stdin.")
@click.option(
    "--min-severity",
    type=click.Choice(SEVERITIES),
    default="note",
    show_default=True,
    help="Report nothing below it.",
)
@click.option("--exit-zero", is_flag=True, help="Exit 0 whatever is found; errors still exit 2.")
@click.option("--quiet", "-q", is_flag=True, help="Findings and errors only.")
@click.pass_context
def command(context: click.Context, /, **values: Any) -> None:
    """Find positions, distances and frequency tables that a lower dtype can round.

    PATH is a file, a directory, a notebook, or - for stdin. Nothing that is scanned is imported or run.
    Exit status: 0 notes at most, 1 errors or warnings, 2 a file could not be scanned or the call is wrong.
    """
    options = SimpleNamespace(**values)
    options.fix |= options.fix_only
    if not options.paths and not options.packages:
        raise click.UsageError("give a file, a directory, --package NAME, or - for stdin")
    if "-" in options.paths and (len(options.paths) > 1 or options.packages):
        raise click.UsageError("- reads stdin and stands alone")
    if options.diff and options.style != "text":
        raise click.UsageError("--diff prints a diff; leave --format out")
    if options.add_noqa and (options.fix or options.diff or "-" in options.paths):
        raise click.UsageError("--add-noqa goes with files, and neither with --fix nor --diff")
    try:
        run = _Run(options)
        status = run.stdin() if options.paths == ("-",) else run.files()
    except SafeRopeError as error:
        raise _Failure(str(error)) from error
    except BrokenPipeError:  # `| head` is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    context.exit(status)


class _Run:
    """One call of the command."""

    def __init__(self, options: SimpleNamespace) -> None:
        self.options = options
        self.fixed = 0
        lists = {name: getattr(options, name.replace("-", "_")) for name in LISTS}
        for name, given in lists.items():  # a wrong rule name is an error even where nothing is scanned
            if not name.endswith("exclude"):
                check_rules(given, f"--{name}")
        self.settings = functools.cache(
            lambda directory: load_settings(
                directory, lists, config=options.config, isolated=options.isolated
            )
        )

    def files(self) -> int:
        """Scan what the paths and packages name; return the exit status."""
        options = self.options
        baseline = self._baseline()
        targets = session.collect(options.paths, options.packages, self.settings)
        self._spare(targets.settings)
        if options.show_settings or options.show_files:
            first = next(iter(targets.settings.values()), self.settings(os.curdir))
            _write(
                _encoded(
                    str(first) if options.show_settings else "".join(f"{path}\n" for path in targets.settings)
                )
            )
            return 2 if targets.errors else 0
        cache = Cache(None) if options.no_cache else open_cache()
        try:
            with _progress(options.quiet) as progress:
                results = scan_files(list(targets.settings), cache, jobs=options.jobs, progress=progress)
        finally:
            cache.close()
        if not results and not targets.errors:
            self._note(f"nothing to scan: no Python file or notebook ({targets.excluded} excluded)")
        selection = Selection(targets.settings, results, baseline)
        errors = targets.errors
        if options.fix or options.diff:
            write = not options.diff
            changes = session.fix(selection, results.values(), unsafe=options.unsafe_fixes, write=write)
            errors += changes.errors
            self.fixed = changes.fixed
            if changes.counts:
                self._note(_fixed(changes.counts, "fixed" if write else "would be fixed"))
            if write:
                results = {path: changes.results.get(path, result) for path, result in results.items()}
                selection = Selection(targets.settings, results, baseline)
            else:
                _write(changes.diff)
        if options.add_noqa:
            silenced = session.silence(selection, results)
            self._note(
                f"silenced {_plural(silenced.fixed, 'finding')} in {_plural(len(silenced.counts), 'file')}"
            )
            errors += silenced.errors + [error for result in results.values() for error in result.errors]
            _errors(errors)
            return 2 if errors else 0
        return self._finish(selection, results, errors)

    def _spare(self, sources: Iterable[str]) -> None:
        """Refuse, before anything is scanned, an output that would replace what is to be scanned."""
        baseline = self.options.write_baseline and (self.options.baseline or DEFAULT_FILE)
        outputs = {"--output-file": self.options.output_file, "--baseline": baseline}
        for option, file in outputs.items():
            if file and os.path.realpath(file) in map(os.path.realpath, sources):
                raise ConfigError(f"{option} {file}: that is a file to scan; name another file")

    def stdin(self) -> int:
        """Scan stdin; return the exit status."""
        options = self.options
        baseline = self._baseline()
        name = options.stdin_filename or "<stdin>"
        settings = self.settings(os.path.dirname(name) or os.curdir)
        try:
            data = limited(sys.stdin.buffer)
            result = scan_source(data, name)
        except UnreadableError as error:
            data, result = b"", FileResult(name, errors=(Diagnostic(name, 0, 0, str(error)),))
        results = {} if settings.excludes(name) else {name: result}
        selection = Selection({name: settings}, results, baseline)
        after = data
        if results and (options.fix or options.diff):
            fixed = fix_source(data, result, selection.fixable, unsafe=options.unsafe_fixes, scan=scan_source)
            after, self.fixed = fixed.source, fixed.count
            if not options.diff:
                results[name] = fixed.result
        if options.diff:
            _write(diff(name, data, after))
        elif options.fix:
            _write(after)
        return self._finish(selection, results, [], to_stderr=options.fix)

    def _finish(
        self,
        selection: Selection,
        results: dict[str, FileResult],
        errors: list[Diagnostic],
        *,
        to_stderr: bool = False,
    ) -> int:
        errors = errors + [error for result in results.values() for error in result.errors]
        if self.options.write_baseline:
            return self._write_baseline(selection, results, errors)
        for problem in selection.problems():
            self._note(f"warning: {problem}")
        options = self.options
        shown = () if options.fix_only else SEVERITIES[: SEVERITIES.index(options.min_severity) + 1]
        hits = [hit for hit in session.shown(selection, results) if hit.finding.severity in shown]
        _errors(errors)
        counted = table(hits) if options.statistics else ""
        counted_only = options.statistics and options.style == "text"
        if not options.diff:
            output = _encoded(counted if counted_only else FORMATS[options.style](hits, errors))
            if options.output_file is None:
                _write(output, to_stderr=to_stderr)
            else:
                write_atomically(options.output_file, output)
        if options.diff or not counted_only:
            _write(_encoded(counted), to_stderr=True)
        failed = sum(bool(result.errors) for result in results.values())
        if not options.fix_only:
            self._note(_summary(hits, len(results), failed))
        failing = any(hit.finding.severity != "note" for hit in hits) and not options.exit_zero
        return 2 if errors else int(failing or (options.exit_non_zero_on_fix and self.fixed > 0))

    def _baseline(self) -> Baseline | None:
        if self.options.baseline is None or self.options.write_baseline:
            return None
        return Baseline.load(self.options.baseline)

    def _write_baseline(
        self, selection: Selection, results: dict[str, FileResult], errors: list[Diagnostic]
    ) -> int:
        file = self.options.baseline or DEFAULT_FILE
        try:
            count = Baseline(file).write(session.recorded(selection, results))
        except OSError as error:
            raise SafeRopeError(f"{file}: baseline cannot be written: {error.strerror or error}") from error
        self._note(f"recorded {_plural(count, 'finding')} in {file}")
        _errors(errors)
        return 2 if errors else 0

    def _note(self, message: str) -> None:
        if not self.options.quiet:
            _write(_encoded(message + "\n"), to_stderr=True)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    if quiet or not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from safe_rope.cli._progress import following  # rich takes longer to import than a warm scan

    with following(quiet) as tell:
        yield lambda done, of: tell({"doing": "scanning", "done": done, "of": of})


def _errors(errors: list[Diagnostic]) -> None:
    for error in errors:
        _write(_encoded(f"error: {printable(str(error))}\n"), to_stderr=True)


def _summary(hits: list[Hit], files: int, failed: int) -> str:
    rest = f"; {_plural(failed, 'file')} could not be scanned" if failed else ""
    if not hits:
        return f"no findings in {_plural(files - failed, 'file')}{rest}"
    fixes = [hit.finding.fix for hit in hits]
    safe = sum(fix is not None and fix.safe for fix in fixes)
    unsafe = sum(fix is not None and not fix.safe for fix in fixes)
    with_findings = len({hit.finding.path for hit in hits})
    message = f"{_plural(len(hits), 'finding')} in {with_findings:,} of {_plural(files, 'file')}"
    if safe:
        message += f"; {safe:,} fixable with --fix"
    if unsafe:
        message += f"; {unsafe:,} more with --unsafe-fixes"
    return message + rest


def _fixed(counts: dict[str, int], what: str) -> str:
    return f"{_plural(sum(counts.values()), 'finding')} {what} in {_plural(len(counts), 'file')}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _encoded(text: str) -> bytes:
    return text.encode(sys.stdout.encoding or "utf-8", "backslashreplace")


def _write(data: bytes, *, to_stderr: bool = False) -> None:
    stream = (sys.stderr if to_stderr else sys.stdout).buffer
    stream.write(data)
    stream.flush()

#!/usr/bin/env bash
# What the commands beside it run: finds a Python and hands over to _commands.py.
# Kept to what old shells and bare machines have.
set -euo pipefail

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

fail() {
    echo "error: $1" >&2
    exit 2
}

python=''
here=''
previous=''
for argument in "$@"; do
    case $argument in
        --python=*) python=${argument#--python=} ;;
        --here) here=yes ;;
        --) break ;;
        *) [ "$previous" != --python ] || python=$argument ;;
    esac
    previous=$argument
done

if [ -z "$python" ]; then
    for python in python3 python3.12 python3.11 python3.13 python3.10 ''; do
        ! new_enough "$python" || break
    done
    [ -n "$python" ] || fail "found no Python 3.10 or newer on PATH; install one, or name it with --python"
fi
new_enough "$python" || fail "$python is not a Python 3.10 or newer; give --python one that is"
# What the caller's shell adds to Python must not leak into a pinned environment. Without bytecode each
# process of the tests compiles torch, transformers and DeepSpeed anew, for seven seconds.
[ -n "$here" ] || unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/_commands.py" "$@"

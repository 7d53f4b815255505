# Sourced by the commands beside it: finds a Python and hands over to tools/_commands.py.
# Kept to what old shells and bare machines have.

launch() {
    local command=$1 python='' candidate argument previous=''
    shift
    for argument in "$@"; do
        case $argument in
            --python=*) python=${argument#--python=} ;;
            --) break ;;
            *) [ "$previous" != --python ] || python=$argument ;;
        esac
        previous=$argument
    done

    if [ -n "$python" ]; then
        new_enough "$python" || fail "$python is not a Python 3.10 or newer; give --python one that is"
    else
        for candidate in python3 python3.12 python3.11 python3.13 python3.10; do
            if new_enough "$candidate"; then
                python=$candidate
                break
            fi
        done
        [ -n "$python" ] || fail "found no Python 3.10 or newer on PATH; install one, or name it with --python"
    fi
    # What the caller's shell adds to Python must not leak into the pinned environment.
    unset PYTHONPATH PYTHONHOME
    exec "$python" "$tools/_commands.py" "$command" "$@"
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

fail() {
    echo "error: $1" >&2
    exit 2
}

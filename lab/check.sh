# The checks that a case consists of, the same on the host (bash) and in the guest (busybox's ash).
# shellcheck shell=dash disable=SC2154
#
# A check is a line "begin NAME" in $results, and a line "passed NAME" or "failed NAME" when it is
# over: what began and is not over when the machine is gone hung, or took it down. $output is for
# what the command says.

# check NAME COMMAND...: the command, which may be a function, has to succeed. It runs as a child,
# with `set -eu`.
check() {
    local name=$1 code=0
    shift
    echo "begin $name" >>"$results"
    (set -eux; "$@") >"$output" 2>&1 </dev/null &
    wait $! || code=$?
    if [ $code = 0 ]; then
        echo "passed $name" >>"$results"
    else
        echo "failed $name (exit code $code)" >>"$results"
        sed 's/^/    /' "$output" | tail -n 30 >>"$results"
    fi
}

# refused CODE WORDS COMMAND...: the command ends with that exit code and says the words, in any
# case.
refused() {
    local expected=$1 words=$2 code=0 said
    shift 2
    said=$("$@" 2>&1) || code=$?
    echo "$said"
    [ $code = "$expected" ] && echo "$said" | grep -qi -e "$words"
}

# says WORDS COMMAND...: the command succeeds, and says the words.
says() {
    local words=$1
    shift
    "$@" >"$output.says"
    cat "$output.says"
    grep -q -e "$words" "$output.says"
}

# eventually SECONDS COMMAND...: the command succeeds within that time.
eventually() {
    local end=$(($(date +%s) + $1))
    shift
    until "$@"; do
        [ "$(date +%s)" -le $end ] || return 1
        sleep 0.05
    done >/dev/null 2>&1
}

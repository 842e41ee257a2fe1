package main

import (
	"bytes"
	"net"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDoctorPortTaken(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "kvport", "doctor", "--model", "sim", "--port", port)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.EqualError(t, cmd.Run(), "exit status 1", out.String()+errs.String())
	require.Regexp(t, `(?m)^fail  port .*address already in use\n.*mend: give another --port`, out.String())
	require.Equal(t, 1, strings.Count(out.String(), "\nfail"))
	require.Empty(t, errs.String())
}

func TestSize(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 3 << 30: "3 GiB", 1 << 62: "4.194e+06 TiB"} {
		require.Equal(t, want, size(n))
	}
	require.Equal(t, "unlimited", limit(^uint64(0)))
	require.Equal(t, "a b c", printable("a\nb\x1bc"))
	require.Equal(t, "1,2", numbers([]int{1, 2}))
	require.Empty(t, numbers(nil))
}

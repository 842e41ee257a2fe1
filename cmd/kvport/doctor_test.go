package main

import (
	"bytes"
	"net"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
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

// The line about digests says who sees the blocks, and fails as serve does.
func TestDoctorDigests(t *testing.T) {
	t.Parallel()
	shared := &connector.Info{Name: "X", BeyondMachine: "url has the address 10.0.0.1:6379"}
	for _, c := range []struct {
		settings host.Settings
		info     *connector.Info
		status   status
		says     string
	}{
		{host.Settings{Digest: host.DigestKeyed}, &connector.Info{}, statusOK, "only this machine"},
		{host.Settings{Digest: host.DigestKeyed}, shared, statusFail, "kvport.ticket_key_file is not set"},
		{host.Settings{Digest: host.DigestKeyed, TicketKeyFile: "f"}, shared, statusOK, "10.0.0.1:6379"},
		{host.Settings{Digest: host.DigestXXH3}, shared, statusWarn, "forge"},
		{host.Settings{Digest: host.DigestKeyed}, &connector.Info{Scope: connector.ScopeShared}, statusOK, "in containers that lack"},
	} {
		got := checkDigests(&c.settings, c.info, "vaes")
		require.Equal(t, c.status, got.Status, c.says)
		require.Contains(t, got.Detail, c.says)
		require.Equal(t, c.status != statusOK, got.Mend != "")
	}
	slow := checkDigests(&host.Settings{Digest: host.DigestKeyed}, &connector.Info{}, "portable")
	require.Equal(t, statusWarn, slow.Status)
	require.Contains(t, slow.Detail, "no AES instructions")
}

package relay

import (
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// inNamespace is set in the child that has a network of its own.
const inNamespace = "KVPORT_TEST_NETWORK_NAMESPACE"

// The kernel's own partition, beside the relay's: in a network namespace the loopback device goes down, what
// is sent through the relay meanwhile is not heard, and it arrives, whole and once, when it is up again.
func TestNetworkNamespace(t *testing.T) {
	if os.Getenv(inNamespace) != "" {
		partitions(t)
		return
	}
	up := []string{"-n", "ip", "link", "set", "lo", "up"}
	if out, err := exec.CommandContext(t.Context(), "unshare", up...).CombinedOutput(); err != nil {
		t.Skipf("NO NETWORK NAMESPACE HERE, so the kernel has cut nothing: unshare %v: %v %s", up, err, out)
	}
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "unshare", "-n", self, "-test.run", "^TestNetworkNamespace$", "-test.v")
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "3 partitions")
	t.Log("3 partitions by the kernel, nothing lost and nothing twice")
}

// partitions runs in the child.
func partitions(t *testing.T) {
	device := func(state string) {
		out, err := exec.CommandContext(t.Context(), "ip", "link", "set", "lo", state).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	device("up")
	r := between(t, 1)
	c := dial(t, r)
	_, err := say(c, []byte("up")) // the relay has dialled on
	require.NoError(t, err)
	for n := byte(1); n <= 3; n++ {
		said := []byte{n, n, n}
		device("down")
		_, err := c.Write(said)
		require.NoError(t, err)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
		_, err = c.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		device("up")
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		back := make([]byte, len(said))
		_, err = io.ReadFull(c, back)
		require.NoError(t, err)
		require.Equal(t, said, back)
	}
	t.Log("3 partitions")
}

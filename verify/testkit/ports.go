// Package testkit has what tests of several packages share.
package testkit

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BoundPorts are the addresses that TCP and UDP sockets of a process are bound to without a peer.
func BoundPorts(t *testing.T, pid int) (out []string) {
	t.Helper()
	own := map[string]bool{}
	folder := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(folder)
	require.NoError(t, err)
	for _, fd := range fds {
		if to, err := os.Readlink(folder + "/" + fd.Name()); err == nil {
			own[to] = true
		}
	}
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		lines, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if os.IsNotExist(err) {
			continue // no IPv6
		}
		require.NoError(t, err)
		for line := range strings.Lines(string(lines)) {
			f := strings.Fields(line)
			if len(f) < 10 || !own["socket:["+f[9]+"]"] || strings.Trim(f[2], "0:") != "" {
				continue
			}
			host, hex, _ := strings.Cut(f[1], ":")
			port, err := strconv.ParseUint(hex, 16, 16)
			require.NoError(t, err)
			ip := net.IPv4(127, 0, 0, 1)
			if n, err := strconv.ParseUint(host, 16, 32); err == nil && n != 0 { // in the machine's order
				ip = net.IPv4(byte(n), byte(n>>8), byte(n>>16), byte(n>>24))
			}
			out = append(out, net.JoinHostPort(ip.String(), strconv.FormatUint(port, 10)))
		}
	}
	return out
}

// PutFrame sends UCX's frame that puts 64 bytes at an address of the process that listens at to, and waits until
// the other end has read it or hung up.
func PutFrame(t *testing.T, to string, addr uint64) {
	t.Helper()
	dialer := net.Dialer{Timeout: 5 * time.Second}
	conn, err := dialer.DialContext(t.Context(), "tcp", to)
	require.NoError(t, err)
	defer conn.Close()
	const magic, put, head = 0xCAFEBABE12345678, 33, 20
	frame := binary.LittleEndian.AppendUint64(nil, magic)
	frame = binary.LittleEndian.AppendUint32(append(frame, put), head)
	frame = binary.LittleEndian.AppendUint64(frame, addr)
	frame = binary.LittleEndian.AppendUint64(frame, 64)
	frame = append(binary.LittleEndian.AppendUint32(frame, 0), strings.Repeat("x", 64)...)
	require.Len(t, frame, 97)
	_, err = conn.Write(frame)
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Second)))
	_, _ = conn.Read(make([]byte, 1)) // the end, or time for it to be read
}

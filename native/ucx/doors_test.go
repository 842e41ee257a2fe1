package ucx

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestClosed: whatever an operator's UCX_TLS says, no transport with a port is in the list.
func TestClosed(t *testing.T) {
	for _, c := range []struct {
		wanted string
		far    bool
		list   string
		out    []string
	}{
		{"", false, "posix,cma,self", nil},
		{"all", false, "posix,cma,self", nil},
		{"", true, "ib,self", nil},
		{"posix,self", false, "posix,self", nil},
		{"sm,self", false, "cma,posix,self", nil},
		{"shm,mm,posix", false, "cma,posix", nil},
		{"rc,tcp,cuda_copy,sm,self", false, "cma,posix,self", []string{"rc", "tcp", "cuda_copy"}},
		{"sysv,posix,self", false, "posix,self", []string{"sysv"}},
		{"^cma", false, "posix,self", nil},
		{"^tcp", false, "cma,posix,self", nil},
		{"^ib", false, "cma,posix,self", nil},
		{"rc,tcp,sm,self", true, "rc,self", []string{"tcp", "sm"}},
		{"rc_mlx5,ud_x,dc", true, "dc,rc_mlx5,ud_x", nil},
		{"^tcp", true, "ib,self", nil},
	} {
		list, out, err := Closed(c.wanted, c.far)
		require.NoError(t, err, c.wanted)
		require.Equal(t, c.list, list, c.wanted)
		require.Equal(t, c.out, out, c.wanted)
	}
	for wanted, far := range map[string]bool{"tcp": false, "tcp,self": false, "^posix": false, "cma,self": false, "sysv": false, "rc": false, "sm,self": true, "tcp,sm": true, "^ib": true} {
		_, _, err := Closed(wanted, far)
		require.ErrorIs(t, err, ErrOpenPort, wanted)
		require.ErrorContains(t, err, wanted)
	}
	_, _, err := Closed("^ud", true)
	require.ErrorIs(t, err, ErrInvalid)
}

package ticket

import (
	"bytes"
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Derived keys differ by purpose and name, and stay what they are: engines of several builds share them.
func TestDerivedKeys(t *testing.T) {
	root, err := LinkRoot(key)
	require.NoError(t, err)
	one, err := LinkKey(root, "OneConnector")
	require.NoError(t, err)
	other, err := LinkKey(root, "OtherConnector")
	require.NoError(t, err)
	router, err := RouterKey(key)
	require.NoError(t, err)
	all := [][]byte{key, root, one, other, router}
	for i, a := range all {
		require.Len(t, a, 32)
		for _, b := range all[:i] {
			require.False(t, bytes.Equal(a, b))
		}
	}
	for want, k := range map[string][]byte{
		"320bbadab7adc2954bb1d0ef4c52bc9af7980fa43c3534c703f48c020357c7a5": root,
		"499b043b4b26590323578710943562b7a84f8dc5822ec68e9356bfedab8e1d60": one,
		"e66bfce55f6e80b3423667287111a477635d12c623f6d20ffce557e95abc4a27": router,
	} {
		require.Equal(t, want, hex.EncodeToString(k))
	}
	for _, short := range [][]byte{nil, key[:15]} {
		_, err := LinkRoot(short)
		require.ErrorIs(t, err, connector.ErrIncompatible)
		_, err = LinkKey(short, "OneConnector")
		require.ErrorIs(t, err, connector.ErrIncompatible)
		_, err = RouterKey(short)
		require.ErrorIs(t, err, connector.ErrIncompatible)
	}
}

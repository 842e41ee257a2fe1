package storekit

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func TestMark(t *testing.T) {
	digests := append([]byte{2, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8}, make([]byte, 32)...)
	mark, at := Mark(connector.Item{Spans: [][]byte{make([]byte, 100), nil, digests}})
	require.Equal(t, digests[:16], mark)
	require.Equal(t, 100, at)
	for name, spans := range map[string][][]byte{
		"no span": nil, "empty": {digests, nil}, "short": {digests[:15]}, "zeros": {make([]byte, 48)}, "no header": {append([]byte{2, 1}, digests...)},
	} {
		mark, _ := Mark(connector.Item{Spans: spans})
		require.Nil(t, mark, name)
	}
}

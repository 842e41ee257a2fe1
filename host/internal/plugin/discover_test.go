package plugin

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

// A plugin that prints without end takes no more memory than the limit.
func TestLimitedBuffer(t *testing.T) {
	var why error
	b := limitedBuffer{full: func(err error) { why = err }}
	n, err := io.Copy(&b, io.LimitReader(zeros{}, 64<<20))
	require.ErrorIs(t, err, errFlood)
	require.ErrorIs(t, why, errFlood)
	require.EqualValues(t, maxManifest, n)
	require.Equal(t, maxManifest, b.kept.Len())
}

// zeros is a reader without an end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

package nixl

import (
	"bytes"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// many is an answer about that many blocks.
func many(blocks int) *answer {
	a := &answer{Metadata: bytes.Repeat([]byte{7}, 1500), Segments: []segment{{Addr: 1, Stride: 2, Bytes: 3}}, Tokens: max(1, 16*blocks)}
	for i := range blocks {
		key := connector.BlockKey{byte(i), byte(i >> 8), 9}
		a.Blocks = append(a.Blocks, heldBlock{Group: uint16(i % 3), ID: connector.BlockID(i*7919%10007 - 1), Key: key[:]})
	}
	return a
}

func TestMessage(t *testing.T) {
	for _, blocks := range []int{0, 1, 171, 20000} {
		want, got := many(blocks), answer{}
		var wire bytes.Buffer
		require.NoError(t, writeMessage(&wire, want))
		require.NoError(t, readMessage(&wire, maxMessage, &got))
		if blocks == 0 {
			want.Blocks = []heldBlock{}
		}
		require.Equal(t, *want, got)
	}
	q, got := question{Version: protocolVersion, Secret: []byte{0, 1, 0}, Load: "a\x00b"}, question{}
	var wire bytes.Buffer
	require.NoError(t, writeMessage(&wire, &q))
	require.NoError(t, readMessage(&wire, maxQuestion, &got))
	require.Equal(t, q, got)
	require.Error(t, writeMessage(&wire, &answer{Blocks: []heldBlock{{Key: []byte{1}}}}))
}

// A message that is cut or changed anywhere is an error.
func TestMessageDamaged(t *testing.T) {
	var wire bytes.Buffer
	require.NoError(t, writeMessage(&wire, many(3)))
	whole := wire.Bytes()
	for at := range whole {
		require.Error(t, readMessage(bytes.NewReader(whole[:at]), maxMessage, &answer{}), "cut at %d", at)
		damaged := bytes.Clone(whole)
		damaged[at] ^= 1 << (at % 8)
		require.Error(t, readMessage(bytes.NewReader(damaged), maxMessage, &answer{}), "changed at %d", at)
	}
	require.Error(t, readMessage(bytes.NewReader(whole), len(whole)-headSize-1, &answer{}))
	require.Error(t, (&answer{}).parseTail(make([]byte, blockSize+1)))
	require.NoError(t, (&answer{}).parseTail(nil))
}

func FuzzTail(f *testing.F) {
	tail, err := many(3).appendTail(nil)
	require.NoError(f, err)
	f.Add(tail)
	f.Add(bytes.Repeat([]byte{math.MaxUint8}, blockSize))
	f.Fuzz(func(t *testing.T, tail []byte) {
		var a answer
		if a.parseTail(tail) != nil {
			require.NotZero(t, len(tail)%blockSize)
			return
		}
		again, err := a.appendTail(nil)
		require.NoError(t, err)
		require.True(t, bytes.Equal(tail, again))
	})
}

// BenchmarkMessage is what an answer costs either end, beside the read that it is for.
func BenchmarkMessage(b *testing.B) {
	for _, blocks := range []int{16, 171, 2048} {
		a, wire := many(blocks), bytes.Buffer{}
		b.Run(fmt.Sprintf("write/%d", blocks), func(b *testing.B) {
			for b.Loop() {
				wire.Reset()
				require.NoError(b, writeMessage(&wire, a))
			}
		})
		b.Run(fmt.Sprintf("read/%d", blocks), func(b *testing.B) {
			for b.Loop() {
				var got answer
				require.NoError(b, readMessage(bytes.NewReader(wire.Bytes()), maxMessage, &got))
			}
		})
	}
}

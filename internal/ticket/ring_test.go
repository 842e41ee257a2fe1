package ticket

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
)

// Files of the old form are the keys that they were: whatever earlier versions made of them is accepted, and they
// accept what is made now. The values were written by the last version without rings.
func TestOldFiles(t *testing.T) {
	const body = "0100000000000000050000000000000009000000640000000100000006fc23ac00894ca0ab3c32f9e14d51b2624d65cdd3c6668ded9f965254562a0c7a915adfa1ba63b23db8a17cac3df419a2837697515734ece2f5a701a05a8c5aa26e43600c01000000000000000000000000000000000000030000000c702d30706c7567696e206279746573"
	for _, c := range []struct{ text, key, id, link, router, registration, mac string }{
		{
			"0123456789abcdef0123456789abcdef", "b2788013bb6497fd0c7b6d1753208906a760a6d47746cfec92728ae9d68e6a42", "89d9a6bb339bd7e2",
			"af222ec305b37e8b0608e1f575f0703e82ffac06a25812f5600cc036a5775287", "71c2c93472ff4b15bb5620bea8debb928e0404c79d41802c7a2411c049e2c179",
			"474bcf73e0b9810bc92026993bbdabeb", "5ede3cc3bfbeac5a537e684e8a7464fb066da8ffbc2a454b7fff789c2e094a41",
		},
		{
			" \t0123456789abcdef0123456789abcdef\r\n\n", "b2788013bb6497fd0c7b6d1753208906a760a6d47746cfec92728ae9d68e6a42", "89d9a6bb339bd7e2",
			"af222ec305b37e8b0608e1f575f0703e82ffac06a25812f5600cc036a5775287", "71c2c93472ff4b15bb5620bea8debb928e0404c79d41802c7a2411c049e2c179",
			"474bcf73e0b9810bc92026993bbdabeb", "5ede3cc3bfbeac5a537e684e8a7464fb066da8ffbc2a454b7fff789c2e094a41",
		},
		{
			"\x00\x01\xfe\xff binary key with a lot of bytes \x80", "b859357b54e7d46e4950be399a7ab8ba489d0d35f896c3eccaef13e1714726cd", "3818fdfdff2e54d1",
			"befd2323078983255bd6bad2121d07f5fe6131fc41dce9247d9e04615325d141", "7fcb07a2bc097a7e95c74005a52fe79301a7fe703616c577d5a341ad6aba310f",
			"a91d226eb88071bac71dc66bbd12ccf4", "9e2f7d9101548f4fd75161a8aa8f24b2955c4d42cd3b77940cf1d52acea17c5a",
		},
		{
			"# a comment is part of an old key\nmore of the key\n", "9a352b0f4e8ae5b90259033de03285a91426a27902eca730ab1603dda1fdf79f", "d67896187172e67d",
			"bead0eb0851cf5ad996a5e478a179ebcb9c538c36b3764c1ca7b21ee16810ed2", "af0db90a358d2e6ebbf4b0c76f0f1f31253354329b868f49c5f5e84bf8babeb6",
			"122796ea6cdd899f9f97e268f1c4447d", "0745658e5a629a516c5fd940a080df906b2b0390caad9cdbf25b58623b3cf02f",
		},
		{
			"aaaaaaaaaaaaaaaa 00112233445566778899aabbccddeeff\n", "e20951a038fc3588d7902611043180d53c4d2ff3ae3f6590586d908ec73d58aa", "4e4984ef4a426b79",
			"1043523a1d071cb1bf9740499667f8fca60d62b2747377529c7b5871252e573d", "d2468e06cb5ca63f42f37858155d884071aa7d53c3654ccd98e7caaa01cd3f03",
			"3b564d55c95cc2709276e46935c496a6", "d7c20a84c3d3e451e7bc868f8917128fee4b27e409c5c084ecfbb84279321cd2",
		},
	} {
		path := filepath.Join(t.TempDir(), "key")
		require.NoError(t, os.WriteFile(path, []byte(c.text), 0o600))
		r, err := keyring.Load(path)
		require.NoError(t, err)
		require.True(t, r.Old)
		require.Equal(t, []string{c.id}, r.IDs())
		require.Equal(t, c.key, hex.EncodeToString(r.First().Secret))
		root, err := LinkRoot(r.First().Secret)
		require.NoError(t, err)
		link, err := LinkKey(root, "OneConnector")
		require.NoError(t, err)
		require.Equal(t, c.link, hex.EncodeToString(link))
		router, err := RouterKey(r.First().Secret)
		require.NoError(t, err)
		require.Equal(t, c.router, hex.EncodeToString(router))
		signature, err := SignForRouter(r, RegisterText, "body")
		require.NoError(t, err)
		require.Equal(t, c.registration, signature)
		data, err := Seal(r, envelope())
		require.NoError(t, err)
		require.Equal(t, body+c.mac, hex.EncodeToString(data), "earlier versions read it")
		_, err = Open(r, data)
		require.NoError(t, err)
	}
}

// A ticket is accepted as long as the ring has the key that signed it, wherever in the ring. Without the key it is refused
// by name.
func TestRotation(t *testing.T) {
	one := keyring.Of(bytes.Repeat([]byte{1}, 32))
	both, err := one.Rotate(time.Unix(1e9, 0))
	require.NoError(t, err)
	second := both.Keys[1].ID
	promoted, err := both.Promote(second)
	require.NoError(t, err)
	last, err := promoted.Drop(one.First().ID)
	require.NoError(t, err)
	steps := []*keyring.Ring{one, both, promoted, last}
	for i, signer := range steps {
		data, err := Seal(signer, envelope())
		require.NoError(t, err)
		require.LessOrEqual(t, len(data), MaxSize)
		for j := max(0, i-1); j <= min(i+1, 3); j++ { // engines are at most one step apart
			e, err := Open(steps[j], data)
			require.NoError(t, err, "signed in step %d, read in step %d", i, j)
			require.Equal(t, envelope(), e)
		}
	}
	data, err := Seal(both, envelope())
	require.NoError(t, err)
	_, err = Open(last, data)
	require.Equal(t, &ForeignKeyError{one.First().ID}, err)
	require.ErrorContains(t, err, one.First().ID)
	for i := range data[1:] {
		data[i+1] ^= 1
		_, err := Open(both, data)
		require.Error(t, err)
		data[i+1] ^= 1
	}
	for i := range data {
		_, err := Open(both, data[:i])
		require.Error(t, err)
	}
}

// Routers sign with a key that both engines of a request know.
func TestSignForRouter(t *testing.T) {
	one := keyring.Of(bytes.Repeat([]byte{1}, 32))
	both, err := one.Rotate(time.Unix(1e9, 0))
	require.NoError(t, err)
	a, b := both.Keys[0], both.Keys[1]
	promoted, err := both.Promote(b.ID)
	require.NoError(t, err)
	sign := func(r *keyring.Ring, by ...string) string {
		s, err := SignForRouter(r, RequestIDText, "text", by...)
		require.NoError(t, err)
		return s
	}
	require.Equal(t, sign(one), sign(both))
	require.Equal(t, sign(one), sign(promoted, a.ID, b.ID), "one of them may not know the new key")
	require.Equal(t, sign(one), sign(promoted, a.ID, a.ID))
	require.Equal(t, sign(one), sign(both, a.ID, b.ID), "the router has not heard of the promotion yet")
	back, err := promoted.Promote(a.ID)
	require.NoError(t, err)
	require.Equal(t, sign(one), sign(back, b.ID, a.ID), "the promotion is taken back")
	undated := &keyring.Ring{Keys: []keyring.Key{{ID: b.ID, Secret: b.Secret}, {ID: a.ID, Secret: a.Secret}}}
	require.Equal(t, sign(one), sign(undated, a.ID, b.ID), "without ages the last one")
	require.NotEqual(t, sign(one), sign(promoted))
	require.Equal(t, sign(promoted), sign(promoted, b.ID, b.ID))
	require.Equal(t, sign(promoted), sign(promoted, "", "gone"))
	require.Equal(t, a.ID, VerifyForRouter(promoted, RequestIDText, "text", sign(one)))
	require.Equal(t, b.ID, VerifyForRouter(both, RequestIDText, "text", sign(promoted)))
	require.Empty(t, VerifyForRouter(one, RequestIDText, "text", sign(promoted)))
	require.Empty(t, VerifyForRouter(both, RegisterText, "text", sign(one)))
	_, err = SignForRouter(keyring.Of(nil), RequestIDText, "text")
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

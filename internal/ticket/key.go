package ticket

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
)

// What keys are derived for. A key for one says nothing of another, nor of the key that signs tickets.
const (
	linkPurpose   = "kvport/link/1"   // what the plugins of a deployment know each other by
	routerPurpose = "kvport/router/1" // what its routers sign with
)

// derivedKey is the length of a derived key.
const derivedKey = 32

// LinkRoot derives what all link keys of a deployment come from.
func LinkRoot(key []byte) (connector.Secret, error) { return derive(key, linkPurpose) }

// LinkKey derives the key by which the plugins of one connector know each other, whatever composite they are
// in. name is the connector's in its manifest.
func LinkKey(root connector.Secret, name string) (connector.Secret, error) {
	return derive(root, linkPurpose+"/"+name)
}

// RouterKey derives the key for [SignText] and [VerifyText], which routers and connectors share.
func RouterKey(key []byte) (connector.Secret, error) { return derive(key, routerPurpose) }

// OfRing derives a key from each one of a ring, in the ring's order, such as [LinkRoot] or [RouterKey] does.
func OfRing(ring *keyring.Ring, from func(key []byte) (connector.Secret, error)) ([]connector.Secret, error) {
	keys := make([]connector.Secret, len(ring.Keys))
	for i := range ring.Keys {
		var err error
		if keys[i], err = from(ring.Keys[i].Secret); err != nil {
			return nil, err
		}
	}
	return keys, nil
}

func derive(key []byte, purpose string) (connector.Secret, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
	out, err := hkdf.Key(sha256.New, key, nil, purpose, derivedKey)
	if err != nil {
		return nil, fmt.Errorf("derive a key: %w", err)
	}
	return out, nil
}

// What texts are signed for. A signature for one is none for another.
const (
	RequestIDText = "request-id"   // the addresses of a request's two engines
	RegisterText  = "registration" // an engine's registration with a router
)

// SignText signs a text for a purpose: 32 hexadecimal digits.
func SignText(key []byte, purpose, text string) string {
	h := hmac.New(sha256.New, key)
	h.Write([]byte("kvport/" + purpose + "/1\x00" + text))
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// VerifyText reports whether SignText made a signature.
func VerifyText(key []byte, purpose, text, signature string) bool {
	return hmac.Equal([]byte(SignText(key, purpose, text)), []byte(signature))
}

// SignForRouter signs a text with the router's key that comes from the first key of a ring. If by names keys, it is the
// oldest of them: whoever has registered with a newer one reads it as well, while who still signs with the oldest may have
// been started before the others were made. Of keys of one age, or of none that is known, it is the last in the ring.
func SignForRouter(ring *keyring.Ring, purpose, text string, by ...string) (string, error) {
	key, found := ring.First(), false
	for i := range ring.Keys {
		k := ring.Keys[i]
		if slices.Contains(by, k.ID) && (!found || !k.Added.After(key.Added)) {
			key, found = k, true
		}
	}
	derived, err := RouterKey(key.Secret)
	if err != nil {
		return "", err
	}
	return SignText(derived, purpose, text), nil
}

// VerifyForRouter names the key of the ring from which the router's key comes that made a signature; empty if
// none of them did.
func VerifyForRouter(ring *keyring.Ring, purpose, text, signature string) (by string) {
	for i := range ring.Keys {
		derived, err := RouterKey(ring.Keys[i].Secret)
		if err == nil && VerifyText(derived, purpose, text, signature) {
			by = ring.Keys[i].ID
		}
	}
	return by
}

package ticket

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
)

// What texts are signed for. A signature for one is none for another.
const (
	RequestIDText = "request-id"   // the addresses of a request's two engines
	RegisterText  = "registration" // an engine's registration with a router
	keyIDText     = "key-id"
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

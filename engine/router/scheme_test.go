package router

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/register"
)

// An engine that is started again with HTTPS, or without it, is reached in the new way, and one of a flag by the URL of the flag.
func TestRegisteredScheme(t *testing.T) {
	r, err := New(Config{Register: signer(time.Minute), Decode: []string{"https://127.0.0.1:8"}})
	require.NoError(t, err)
	at := time.Now().UnixNano()
	urls := func(secure bool, host string) (list []string) {
		at++
		code, text := say(t, r, true, register.Message{Type: "D", HTTP: host, TLS: &secure, At: at})
		require.Equal(t, http.StatusOK, code, text)
		for _, in := range r.pool.health().instances {
			list = append(list, in.URL)
		}
		return list
	}
	for range 2 {
		require.Equal(t, []string{"https://127.0.0.1:8", "http://127.0.0.1:7"}, urls(false, "127.0.0.1:7"))
		require.Equal(t, []string{"https://127.0.0.1:8", "https://127.0.0.1:7"}, urls(true, "127.0.0.1:7"))
	}
	require.Equal(t, []string{"https://127.0.0.1:8", "https://127.0.0.1:7"}, urls(false, "127.0.0.1:8"))
}

package router

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/pairid"
)

// TestForeignIDs: ids with which another router in front names engines are replaced and counted, and the log says so once, with what was met.
func TestForeignIDs(t *testing.T) {
	unique := strings.Repeat("0", 32)
	for id, says := range map[string]string{
		pairid.Prefix + "10.0.0.1:1___decode_addr_10.0.0.2:2_" + unique:                          "prefill=10.0.0.1:1 decode=10.0.0.2:2",
		pairid.Prefix + "prefill_1:1___decode_addr_10.0.0.2:2_" + unique:                         `the address of its prefill engine is \"prefill_1:1\", want HOST:PORT`,
		pairid.Prefix + strings.Repeat("x", 1<<16) + "___decode_addr_10.0.0.2:2_" + unique:       "the address of its prefill engine is",
		pairid.Prefix + "10.0.0.1:1___decode_addr_10.0.0.2:2_" + unique + "; and something more": "what is before or behind its addresses",
	} {
		var log bytes.Buffer
		var ids sync.Map
		r, err := New(Config{Decode: []string{"http://" + registeredInstance(t, "D", &ids)}, Log: slog.New(slog.NewTextHandler(&log, nil))})
		require.NoError(t, err)
		ask := func(id string) {
			w := httptest.NewRecorder()
			req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":"x"}`))
			req.Header.Set("X-Request-Id", id)
			r.ServeHTTP(w, req)
			require.Equal(t, http.StatusOK, w.Code)
			got, _ := ids.Load("D")
			require.Equal(t, w.Header().Get("X-Request-Id"), got)
			require.Len(t, got, 32)
		}
		ask("a client's own")
		require.NotContains(t, log.String(), "names two engines")
		for range 20 {
			ask(id)
		}
		require.Equal(t, 1, strings.Count(log.String(), "names two engines"), log.String())
		require.Contains(t, log.String(), says)
		require.Less(t, log.Len(), 4096)
		require.Equal(t, 20.0, testutil.ToFloat64(r.metrics.foreignIDs))
		r.Close()
	}
}

// TestAddressesThatNoIDNames: an instance may take blocks where no request id can name it. Its requests go without one, are counted, and the log says
// once which address that is; when it registers with another, ids name it.
func TestAddressesThatNoIDNames(t *testing.T) {
	var log bytes.Buffer
	r, err := New(Config{Register: signer(time.Minute), Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer r.Close()
	var ids sync.Map
	p, d, at := registeredInstance(t, "P", &ids), registeredInstance(t, "D", &ids), time.Now().UnixNano()
	ask := func(kv string) string {
		at++
		for part, one := range map[string][2]string{"P": {p, kv}, "D": {d, "10.0.0.2:2"}} {
			code, text := say(t, r, true, old(part, one[0], one[1], at))
			require.Equal(t, http.StatusOK, code, text)
		}
		w := httptest.NewRecorder()
		r.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":"x"}`)))
		require.Equal(t, http.StatusOK, w.Code)
		id, _ := ids.Load("P")
		return fmt.Sprint(id)
	}
	for range 5 {
		require.NotContains(t, ask("[fe80::1%eth0]:1"), pairid.Prefix)
	}
	require.Equal(t, 5.0, testutil.ToFloat64(r.metrics.unnamed))
	require.Equal(t, 1, strings.Count(log.String(), "no request id can name"), log.String())
	require.Contains(t, log.String(), "kv=[fe80::1%eth0]:1")
	require.Contains(t, ask("[fe80::1]:1"), pairid.Prefix+"[fe80::1]:1___decode_addr_10.0.0.2:2_")
	require.Equal(t, 5.0, testutil.ToFloat64(r.metrics.unnamed))
	require.Equal(t, 1.0, testutil.ToFloat64(r.metrics.introduced))
}

package p2pnccl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
)

// registration is what an engine tells a router, again and again. Type, HTTP and KV have vLLM's names.
type registration struct {
	Type string `json:"type"`         // P or D
	HTTP string `json:"http_address"` // where requests go
	KV   string `json:"zmq_address"`  // where blocks go
	// At is the time in nanoseconds, on the engine's clock: a registration that is older than the last one
	// from there is a replay.
	At int64 `json:"at"`
}

// macHeader carries the signature of a registration.
const macHeader = "X-Kvport-Mac"

// registrar registers one engine with one router until its context ends.
type registrar struct {
	url    string
	key    []byte
	every  time.Duration
	log    *slog.Logger
	client http.Client

	done, failed atomic.Int64
}

func newRegistrar(c *Config, router string, key []byte, log *slog.Logger) *registrar {
	every := time.Duration(c.RegisterMS) * time.Millisecond
	if every == 0 {
		every = 3 * time.Second
	}
	return &registrar{
		url: "http://" + router + "/register",
		key: key, every: every, log: log, client: http.Client{Timeout: every, Transport: &http.Transport{}},
	}
}

// types are the parts an engine plays for a router.
func types(r connector.Role) []string {
	switch r {
	case connector.RoleProducer:
		return []string{"P"}
	case connector.RoleConsumer:
		return []string{"D"}
	case connector.RoleBoth:
	}
	return []string{"P", "D"}
}

// run registers as each of the types, at once and then regularly.
func (r *registrar) run(ctx context.Context, types []string, httpAddress, kvAddress string) {
	defer r.client.CloseIdleConnections()
	tick := time.NewTicker(r.every)
	defer tick.Stop()
	well := true
	for {
		for _, t := range types {
			err := r.register(ctx, &registration{Type: t, HTTP: httpAddress, KV: kvAddress, At: time.Now().UnixNano()})
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				r.failed.Add(1)
			default:
				r.done.Add(1)
			}
			if (err == nil) != well {
				well = err == nil
				r.log.Warn("registration with the router has changed", "router", r.url, "well", well, "error", err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (r *registrar) register(ctx context.Context, what *registration) error {
	body, err := json.Marshal(what)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(macHeader, ticket.SignText(r.key, ticket.RegisterText, string(body)))
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d: %s", resp.StatusCode, bytes.TrimSpace(answer))
	}
	return nil
}

func registrations(all []*registrar) []connector.Stat {
	done, failed := int64(0), int64(0)
	for _, r := range all {
		done += r.done.Load()
		failed += r.failed.Load()
	}
	return []connector.Stat{
		{Name: "registrations_total", Labels: []string{"ok"}, Value: float64(done)},
		{Name: "registrations_total", Labels: []string{"failed"}, Value: float64(failed)},
	}
}

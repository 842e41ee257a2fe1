// Package register tells routers where an engine is, again and again, and that it leaves.
//
// A registration is good once: it has the nonce that the router gave with its last answer to the same engine. So neither a
// copy of an earlier registration nor a wrong clock has any effect.
package register

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// Headers of registrations and of their answers.
const (
	MacHeader   = "X-Kvport-Mac"   // the signature of a registration
	NonceHeader = "X-Kvport-Nonce" // the nonce for the next one, in each answer to one that is signed
)

// Message is one registration. Type, HTTP and KV have the names of vLLM's proxies.
type Message struct {
	Type string `json:"type"`                  // P or D
	HTTP string `json:"http_address"`          // HOST:PORT where requests go
	TLS  *bool  `json:"tls,omitempty"`         // they go there over HTTPS; nil: whoever registers does not know
	KV   string `json:"zmq_address,omitempty"` // HOST:PORT where blocks go; empty: the connector needs none
	// Engine is the id of the engine: one that is registered elsewhere with it has moved. Empty: not known.
	Engine string `json:"engine_id,omitempty"`
	Group  string `json:"group,omitempty"` // the replica of the engine; empty: none, or what the router knows
	Leave  bool   `json:"leave,omitempty"` // the engine takes no more requests
	Nonce  string `json:"nonce,omitempty"` // of the router's last answer; what the first registration has instead is refused
	At     int64  `json:"at,omitempty"`    // nanoseconds of the engine's clock, for routers that give no nonces
}

// WantGroup says what the name of a group is.
const WantGroup = "want visible ASCII without spaces or quotes"

// IsGroup reports whether a text can be the name of a group.
func IsGroup(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c > '~' || c == '"' })
}

// NoNonce is the nonce of a registration whose engine has got none yet.
const NoNonce = "none"

// Client registers one engine with one router. Its methods are for one goroutine at a time, except Counts.
type Client struct {
	URL   string                   // of the router's registrar: http://HOST:PORT, https://HOST:PORT or unix:///PATH
	Sign  func(body string) string // with the deployment's key
	Every time.Duration            // between two registrations, which also bounds one; 3 s
	Log   *slog.Logger
	TLS   *tls.Config  // for a registrar over HTTPS; nil: the system's CAs
	HTTP  *http.Client // nil: one of its own

	nonces       map[string]string // by Message.Type
	good, failed atomic.Int64
}

// ErrRefused says that the router has refused a registration.
var ErrRefused = errors.New("the router refuses the registration")

// maxNonce bounds what a router may give, in bytes.
const maxNonce = 128

// Counts are the registrations that were accepted and those that failed.
func (c *Client) Counts() (good, failed int64) { return c.good.Load(), c.failed.Load() }

// Run registers the engine at once and then regularly, as each of the messages says, until ctx ends.
func (c *Client) Run(ctx context.Context, as []Message) {
	if c.Every == 0 {
		c.Every = 3 * time.Second
	}
	next := func() time.Duration { return time.Duration(float64(c.Every) * (0.9 + 0.2*rand.Float64())) }
	Repeat(ctx, next, as, c.say, func(err error) {
		c.Log.Warn("registration with the router has changed", "router", c.URL, "well", err == nil, "error", err)
	})
}

// Repeat makes registrations at once and then again and again, next after which time, until ctx ends. changed is told about the first that
// fails, with its error, and about the first that is well again, without one.
func Repeat[M any](ctx context.Context, next func() time.Duration, as []M, say func(context.Context, M) error, changed func(error)) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	well := true
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		for _, m := range as {
			err := say(ctx, m)
			if ctx.Err() != nil {
				return
			}
			if (err == nil) != well {
				well = err == nil
				changed(err)
			}
		}
		timer.Reset(next())
	}
}

// Leave tells the router that the engine takes no more requests. It follows Run.
func (c *Client) Leave(ctx context.Context, as []Message) error {
	var errs []error
	for _, m := range as {
		m.Leave = true
		errs = append(errs, c.say(ctx, m))
	}
	return errors.Join(errs...)
}

// say makes one registration, with the nonce that the router then gives if it does not take the last one.
func (c *Client) say(ctx context.Context, m Message) error {
	if c.nonces == nil {
		c.nonces = map[string]string{}
	}
	if c.HTTP == nil {
		c.HTTP = &http.Client{Transport: c.transport()}
	}
	if c.Every > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.Every)
		defer cancel()
	}
	before := c.nonces[m.Type]
	err := c.post(ctx, m)
	if errors.Is(err, ErrRefused) && c.nonces[m.Type] != before {
		err = c.post(ctx, m)
	}
	if err != nil {
		c.failed.Add(1)
		return err
	}
	c.good.Add(1)
	return nil
}

// unixScheme begins the URL of a registrar that listens on a unix socket.
const unixScheme = "unix://"

// transport reaches the registrar.
func (c *Client) transport() *http.Transport {
	t := &http.Transport{IdleConnTimeout: time.Minute, TLSClientConfig: c.TLS}
	if path, is := strings.CutPrefix(c.URL, unixScheme); is {
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	}
	return t
}

// target is where registrations are posted.
func (c *Client) target() string {
	if strings.HasPrefix(c.URL, unixScheme) {
		return "http://router/register"
	}
	return strings.TrimRight(c.URL, "/") + "/register"
}

func (c *Client) post(ctx context.Context, m Message) error {
	m.Nonce, m.At = cmp.Or(c.nonces[m.Type], NoNonce), time.Now().UnixNano()
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.target(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(MacHeader, c.Sign(string(body)))
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if nonce := resp.Header.Get(NonceHeader); nonce != "" && len(nonce) <= maxNonce {
		c.nonces[m.Type] = nonce
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: status %d: %s", ErrRefused, resp.StatusCode, bytes.TrimSpace(answer))
	}
	return nil
}

// Close closes idle connections.
func (c *Client) Close() {
	if c.HTTP != nil {
		c.HTTP.CloseIdleConnections()
	}
}

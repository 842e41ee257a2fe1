package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/register"
	"github.com/kvport/kvport/internal/ticket"
)

// leaveTime is how long an engine that ends waits for routers to take note of it.
const leaveTime = time.Second

// checkRegister refuses flags of registration that cannot work.
func (f *serveFlags) checkRegister() error {
	for _, at := range f.routers {
		if !isRegistrar(at) {
			return fmt.Errorf("--register: %q is no URL, want http://HOST:PORT, https://HOST:PORT or unix:///PATH of kvport route --register", at)
		}
	}
	switch {
	case f.registerGroup != "" && len(f.routers) == 0:
		return errors.New("--register-group is for --register")
	case f.registerGroup != "" && !register.IsGroup(f.registerGroup):
		return fmt.Errorf("--register-group is %q, %s", f.registerGroup, register.WantGroup)
	}
	return f.checkRegisterAddress()
}

// isRegistrar reports whether a text is the URL of where engines register.
func isRegistrar(at string) bool {
	u, err := url.Parse(at)
	if err != nil || u.RawQuery != "" || u.User != nil {
		return false
	}
	switch u.Scheme {
	case "http", "https":
		return u.Host != ""
	case "unix":
		return u.Host == "" && strings.HasPrefix(u.Path, "/")
	}
	return false
}

// checkRegisterAddress refuses an address at which nobody could find the engine.
func (f *serveFlags) checkRegisterAddress() error {
	if f.registerAddress == "" {
		return nil
	}
	if len(f.routers) == 0 {
		return errors.New("--register-address is for --register")
	}
	if host, port, err := net.SplitHostPort(f.registerAddress); err != nil || host == "" || port == "" || port == "0" {
		return fmt.Errorf("--register-address is %q, want HOST:PORT", f.registerAddress)
	}
	return nil
}

// registeredAPI is an API that is registered with routers from its start until it drains.
type registeredAPI struct {
	api
	keys    *keyring.File
	keyLog  *slog.Logger
	routers []*routerOfEngine
	end     sync.Once
	ctx     context.Context //nolint:containedctx // of the registrations
	stop    context.CancelFunc
	tasks   sync.WaitGroup
}

// routerOfEngine is a router and what the engine tells it.
type routerOfEngine struct {
	client *register.Client
	says   []register.Message
}

// registered makes the API one that is registered.
func (f *serveFlags) registered(l *net.TCPListener, transfer *host.Config, a api) (*registeredAPI, error) {
	path, log := "", slog.Default()
	if transfer != nil {
		path, log = transfer.Settings.TicketKeyFile, slog.New(slog.DiscardHandler) // the host logs what becomes of the file
	}
	keys, err := keyring.OpenAt(path, log)
	if err != nil {
		return nil, fmt.Errorf("--register: %w", err)
	}
	secure, err := f.registerTLS()
	if err != nil {
		return nil, fmt.Errorf("--register-ca-file: %w", err)
	}
	secured := f.certificate.scheme() == "https"
	in := &registeredAPI{api: a, keys: keys, keyLog: log}
	in.ctx, in.stop = context.WithCancel(context.Background())
	for _, at := range f.routers {
		address, err := f.reachable(in.ctx, l, at)
		if err != nil {
			in.stop()
			return nil, fmt.Errorf("--register %s: %w", at, err)
		}
		r := &routerOfEngine{client: &register.Client{
			URL: at, Log: slog.Default(), TLS: secure,
			Sign: func(body string) string { return signFor(keys, ticket.RegisterText, body) },
		}}
		for _, part := range parts(transfer) {
			m := register.Message{Type: part, HTTP: address, TLS: &secured, Group: f.registerGroup}
			if transfer != nil {
				m.Engine = transfer.EngineID
			}
			r.says = append(r.says, m)
		}
		in.routers = append(in.routers, r)
	}
	return in, nil
}

// registerTLS is how the engine registers over HTTPS: its certificate is the one that its own server has at that time, if any.
func (f *serveFlags) registerTLS() (*tls.Config, error) {
	pool, err := (&tlsFiles{ca: f.registerCA}).pool()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, RootCAs: pool,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if own := f.certificate.config.Load(); own != nil {
				return &own.Certificates[0], nil
			}
			return &tls.Certificate{}, nil // none
		},
	}, nil
}

// signFor signs a text as the routers of a deployment do, by a key that all of keys names; empty if there is none.
func signFor(keys *keyring.File, purpose, text string, by ...string) string {
	signature, err := ticket.SignForRouter(keys.Ring(), purpose, text, by...)
	if err != nil {
		slog.Error("a text for routers cannot be signed", "purpose", purpose, "err", err)
	}
	return signature
}

// parts are the ones that an engine plays for a router. Without a connector it serves alone.
func parts(transfer *host.Config) []string {
	switch {
	case transfer == nil || transfer.Role == connector.RoleConsumer:
		return []string{"D"}
	case transfer.Role == connector.RoleProducer:
		return []string{"P"}
	}
	return []string{"P", "D"}
}

// reachable is the address at which a router reaches the server.
func (f *serveFlags) reachable(ctx context.Context, l *net.TCPListener, router string) (string, error) {
	if f.registerAddress != "" {
		return f.registerAddress, nil
	}
	at, is := l.Addr().(*net.TCPAddr)
	if !is {
		return "", fmt.Errorf("the server listens at %s, give --register-address", l.Addr())
	}
	if !at.IP.IsUnspecified() {
		return at.String(), nil
	}
	u, err := url.Parse(router)
	if err != nil {
		return "", err
	}
	if u.Scheme == "unix" {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(at.Port)), nil
	}
	port := u.Port()
	if port == "" {
		port = "80"
	}
	conn, err := new(net.Dialer).DialContext(ctx, "udp", net.JoinHostPort(u.Hostname(), port)) // sends nothing: it says by which address
	if err != nil {
		return "", fmt.Errorf("no way to the router, give --register-address: %w", err)
	}
	defer conn.Close()
	own, _, err := net.SplitHostPort(conn.LocalAddr().String())
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(own, strconv.Itoa(at.Port)), nil
}

// start begins to register: requests may come.
func (r *registeredAPI) start() {
	r.tasks.Go(func() { r.keys.Watch(r.ctx, r.keyLog, nil) })
	for _, one := range r.routers {
		r.tasks.Go(func() { one.client.Run(r.ctx, one.says) })
	}
}

// Drain implements api. Routers learn that first, so that they send no request which would be refused.
func (r *registeredAPI) Drain() {
	r.leave()
	r.api.Drain()
}

// leave ends the registrations, once.
func (r *registeredAPI) leave() {
	r.stop()
	r.tasks.Wait()
	r.end.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
		defer cancel()
		var tasks sync.WaitGroup
		for _, one := range r.routers {
			tasks.Go(func() {
				if err := one.client.Leave(ctx, one.says); err != nil {
					slog.Warn("a router was not told that this engine ends, it will notice by itself", "router", one.client.URL, "err", err)
				}
			})
		}
		tasks.Wait()
	})
}

// close ends what Drain has not ended.
func (r *registeredAPI) close() {
	r.leave()
	for _, one := range r.routers {
		one.client.Close()
	}
}

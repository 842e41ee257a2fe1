package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router"
	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/meter"
	"github.com/kvport/kvport/internal/ticket"
)

// Defaults of kvport route.
const (
	maxRouted = 1024 // requests at once
	maxQueued = 512  // further requests that wait
)

// shortestTTL is how long an engine that registers is remembered at least.
const shortestTTL = 5 * time.Second

// defaultTurns is how many answers are remembered for the turns that follow: as many as one decode instance offers.
const defaultTurns = 4096

type routeFlags struct {
	listenFlags
	prefill, decode []string
	mode, policy    string
	weights         string
	sessionKey      string
	queryTimeout    time.Duration
	indexBlocks     int
	replicas        []string
	events          []string
	turns           int
	turnsFile       string
	logLevel        string
	register        string
	keyFile         string
	upstreamKeyFile string
	upstreamTLS     tlsFiles

	config                 string
	maxInFlight, queueSize int
	instanceInFlight       int
	queueTimeout           time.Duration
	each                   clientLimits
	attempts               int
	retryShare             float64
	backoff                time.Duration
	registerTTL            time.Duration
	dnsServer              string
	dnsInterval, dnsKeep   time.Duration

	prefillTimeout, firstByteTimeout, answerTimeout, idleTimeout time.Duration
	healthInterval, healthTimeout                                time.Duration
}

func newRoute() *cobra.Command {
	f := &routeFlags{}
	cmd := &cobra.Command{
		Use:   "route --decode URL,... [--prefill URL,...] [--config FILE]",
		Short: "Spread requests over prefill and decode instances",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&f.prefill, "prefill", nil, "base URLs of prefill instances, or dns://NAME:PORT, or dns+srv://_SERVICE._tcp.NAME; without one, decode instances serve alone")
	flags.StringSliceVar(&f.decode, "decode", nil, "base URLs of decode instances, or names as of --prefill")
	flags.StringVar(&f.mode, "mode", "pool", "pool: any prefill instance goes with any decode instance; replica: only with those of its own --replica, or group in the --config file or of --register")
	flags.StringArrayVar(&f.replicas, "replica", nil, "with --mode replica, once for each: NAME=prefill:URL,...;decode:URL,...")
	flags.StringVar(&f.policy, "policy", policy.RoundRobin, "how instances are chosen: "+strings.Join(policy.Names(), ", "))
	flags.StringVar(&f.weights, "policy-weights", "", "what the policy's scorers count, instead of its own weights, such as prefix=1,load=1,session=0")
	flags.StringArrayVar(&f.events, "kv-events", nil, "once for each instance whose /health does not tell it, such as one of vLLM: URL=ENDPOINT or URL=ENDPOINT,REPLAY_ENDPOINT, where it publishes KV events")
	flags.StringVar(&f.sessionKey, "session-key", "header:X-Session-Id", "where a request has the key of its session: header:NAME, cookie:NAME or field:NAME of the body, such as field:user")
	flags.DurationVar(&f.queryTimeout, "cache-query-timeout", 200*time.Millisecond, "how long a request may wait for instances to say what they have of its prompt, if the policy asks for that and nothing is known; 0: they are not asked")
	flags.IntVar(&f.indexBlocks, "kv-index-blocks", 16<<20, "blocks that are known by KV events, of all instances together; each takes about 50 bytes")
	flags.StringVar(&f.register, "register", "", "where instances register by themselves: HOST:PORT, https://HOST:PORT with the certificate of --tls-cert-file, or unix:///PATH, which only this user reaches; port 0 takes a free one, which is logged")
	flags.StringVar(&f.keyFile, "ticket-key-file", "", "with --register: the file of keys that the engines share; default: that of one user on one host")
	flags.IntVar(&f.turns, "bidirectional", 0, fmt.Sprintf("number of answers to remember: prefill instances load from the decode instance that gave an earlier answer of a conversation, all instances are kv_both; 0: none; without the flag %d, of instances that say that they can do so", defaultTurns))
	flags.StringVar(&f.turnsFile, "bidirectional-file", "", "file that keeps what --bidirectional remembers over a restart of the router; it has tickets in it, and mode 0600")
	flags.StringVar(&f.upstreamKeyFile, "upstream-api-key-file", "", "file with the API key of the instances, its first line; without it, and without --api-key-file, clients' own keys are passed on")
	flags.DurationVar(&f.prefillTimeout, "prefill-timeout", 2*time.Minute, "how long a prefill instance may take to answer before another one is tried")
	flags.DurationVar(&f.firstByteTimeout, "first-byte-timeout", 2*time.Minute, "how long a decode instance may take to begin a stream before another one is tried")
	flags.DurationVar(&f.answerTimeout, "answer-timeout", 10*time.Minute, "how long a decode instance may take for an answer that is not streamed before another one is tried")
	flags.DurationVar(&f.idleTimeout, "idle-timeout", 2*time.Minute, "how long a decode instance may be silent in the middle of an answer before that ends with an error")
	flags.DurationVar(&f.healthInterval, "health-interval", time.Second, "how long after a health check of an instance the next one is made")
	flags.DurationVar(&f.healthTimeout, "health-timeout", 2*time.Second, "how long an instance may take to answer a health check; after three without an answer it is down")
	flags.StringVar(&f.upstreamTLS.ca, "upstream-ca-file", "", "file with the CAs of instances whose URLs are https, in PEM (default those of the system)")
	flags.StringVar(&f.upstreamTLS.cert, "upstream-cert-file", "", "file with the certificate that such instances get, in PEM")
	flags.StringVar(&f.upstreamTLS.key, "upstream-key-file", "", "file with the key of --upstream-cert-file, in PEM, readable by its owner only")
	f.addFront(cmd)
	f.add(cmd, 8080)
	addLogLevel(cmd, &f.logLevel)
	return cmd
}

// addFront adds the flags of what happens before an instance is chosen. docs/router.md has them in a table.
func (f *routeFlags) addFront(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.IntVar(&f.maxInFlight, "max-in-flight", maxRouted, "requests that run at once at most, and at most three quarters of --max-connections")
	flags.IntVar(&f.instanceInFlight, "instance-max-in-flight", 0, "requests that run at once on one instance, for those that say no lower number in /health; 0: what each says, and any number on those that say none")
	flags.IntVar(&f.queueSize, "queue-size", maxQueued, "further requests that wait at most, as far as three quarters of --max-connections allow")
	flags.DurationVar(&f.queueTimeout, "queue-timeout", 30*time.Second, "how long a request may wait before it gets a 429")
	flags.IntVar(&f.each.InFlight, "key-max-in-flight", 0, "requests of one client that run at once, 0 for any number; further ones wait")
	flags.IntVar(&f.each.Requests, "key-requests-per-minute", 0, "requests that one client may send in a minute, 0 for any number")
	flags.IntVar(&f.each.Tokens, "key-tokens-per-minute", 0, "tokens of prompts and answers that one client may use in a minute, 0 for any number")
	flags.IntVar(&f.attempts, "attempts", 3, "decode instances that one request is sent to at most, one after the other")
	flags.Float64Var(&f.retryShare, "retry-budget", 0.2, "retries for each request, of those that an instance may have worked on; 100 at once and 10 a second are free")
	flags.DurationVar(&f.backoff, "retry-backoff", 50*time.Millisecond, "pause before the first such retry, which doubles up to 1s")
	flags.StringVar(&f.config, "config", "", "JSON file with instances, limits and the policy, read again whenever it changes; kvport schema --route prints its schema")
	flags.StringVar(&f.dnsServer, "dns-server", "", "HOST:PORT of the server that knows the names (default that of the system)")
	flags.DurationVar(&f.dnsInterval, "dns-interval", 5*time.Second, "time between two lookups of a name")
	flags.DurationVar(&f.dnsKeep, "dns-keep", time.Minute, "how long the instances of a name stay, from when it was last found, once a DNS server says that it has none")
	flags.DurationVar(&f.registerTTL, "register-ttl", 15*time.Second, "how long after its last registration an instance is forgotten, at least 5s")
}

func (f *routeFlags) run(cmd *cobra.Command) error {
	byDefault := !cmd.Flags().Changed("bidirectional")
	if byDefault {
		f.turns = defaultTurns
	}
	if err := f.check(); err != nil {
		return err
	}
	if err := setLog(cmd.ErrOrStderr(), f.logLevel); err != nil {
		return err
	}
	weights, err := policy.ParseWeights(f.weights)
	if err != nil {
		return fmt.Errorf("--policy-weights: %w", err)
	}
	events, err := parseEvents(f.events)
	if err != nil {
		return err
	}
	replicas, err := parseReplicas(f.replicas)
	if err != nil {
		return err
	}
	registering, ring, err := f.registration()
	if err != nil {
		return err
	}
	upstreamKey, secure, err := f.upstream()
	if err != nil {
		return err
	}
	inFlight := f.inFlight(f.maxInFlight)
	var t *front // is made before anything is served
	registry := newRegistry()
	r, err := router.New(router.Config{
		Register: registering,
		Prefill:  f.prefill, Decode: f.decode, Replicas: replicas, Policy: f.policy, Weights: weights, SessionKey: f.sessionKey,
		Events: events, IndexBlocks: f.indexBlocks, QueryTimeout: cmp.Or(f.queryTimeout, -1), Log: slog.Default(), Metrics: registry, Gatherer: registry, File: f.file(), DNS: f.dns(),
		OwnKeys: f.apiKeyFile != "", UpstreamKey: upstreamKey, TLS: secure, Turns: f.turns, TurnsWhereKnown: byDefault, TurnsFile: f.turnsFile,
		MaxInFlight: inFlight, InstanceInFlight: f.instanceInFlight, MaxQueue: f.queue(inFlight), QueueTimeout: f.queueTimeout,
		Limits: router.Limits{Each: f.each.limits()}, Attempts: f.attempts, RetryShare: f.retryShare, Backoff: f.backoff,
		Key:            f.keyCheck(&t),
		SharedKeys:     func() bool { return t.severalKeys() },
		PrefillTimeout: f.prefillTimeout, FirstByteTimeout: f.firstByteTimeout, AnswerTimeout: f.answerTimeout, IdleTimeout: f.idleTimeout,
		HealthInterval: f.healthInterval, HealthTimeout: f.healthTimeout,
	})
	if err != nil {
		return err
	}
	defer r.Close()
	l, keys, err := f.listen()
	if err != nil {
		return err
	}
	t = newFront(l, &f.listenFlags, keys, registry)
	defer t.close()
	probing, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	if err := f.serveRegistrar(probing, &wg, r, ring, registry); err != nil {
		stop()
		return err
	}
	wg.Go(func() { r.Run(probing) })
	_, err = t.serve(cmd.Context(), cmd, r)
	stop()
	wg.Wait()
	return fail(err)
}

// queue is how many requests may wait beside those that run: as many as connections are left.
func (f *routeFlags) queue(inFlight int) int {
	size := min(f.queueSize, f.inFlight(math.MaxInt)-inFlight)
	if size < f.queueSize {
		slog.Warn("fewer requests wait than --queue-size says, since there are too few connections: a higher limit of open files or --max-connections allows more",
			"queue_size", size, "max_in_flight", inFlight, "connections", f.connections())
	}
	return size
}

// checkMode refuses flags that do not go with the mode.
func (f *routeFlags) checkMode() error {
	switch {
	case f.mode != "pool" && f.mode != "replica":
		return fmt.Errorf("--mode is %q, want pool or replica", f.mode)
	case f.mode == "pool" && len(f.replicas) > 0:
		return errors.New("--replica is for --mode replica")
	case f.mode == "replica" && len(f.prefill)+len(f.decode) > 0:
		return errors.New("--prefill and --decode are for --mode pool; with --mode replica each --replica has its own")
	case f.mode == "replica" && len(f.replicas) == 0 && f.config == "" && f.register == "":
		return errors.New("--mode replica requires at least one --replica, such as a=prefill:http://HOST:PORT;decode:http://HOST:PORT, or a --config file with groups, or --register")
	}
	return nil
}

// check refuses flags that cannot work.
func (f *routeFlags) check() error {
	if err := f.checkMode(); err != nil {
		return err
	}
	switch {
	case !slices.Contains(policy.Names(), f.policy):
		return fmt.Errorf("--policy is %q, want %s", f.policy, strings.Join(policy.Names(), ", "))
	case f.queryTimeout < 0:
		return fmt.Errorf("--cache-query-timeout is %v, want a time such as 200ms, or 0", f.queryTimeout)
	case f.turns < 0:
		return fmt.Errorf("--bidirectional is %d, want a number of answers", f.turns)
	case f.turnsFile != "" && f.turns == 0:
		return errors.New("--bidirectional-file is for --bidirectional, which is 0: nothing is remembered")
	case len(f.decode) == 0 && len(f.replicas) == 0 && f.register == "" && f.config == "":
		return errors.New("--decode is required: the base URL of at least one decode instance, or --config or --register")
	case f.keyFile != "" && f.register == "":
		return errors.New("--ticket-key-file is for --register")
	}
	if err := f.checkTimes(); err != nil {
		return err
	}
	if err := f.upstreamTLS.check(upstreamTLS()); err != nil {
		return err
	}
	return f.checkFront()
}

// checkTimes refuses times that cannot work.
func (f *routeFlags) checkTimes() error {
	for _, limit := range []struct {
		flag  string
		value time.Duration
	}{
		{"prefill-timeout", f.prefillTimeout},
		{"first-byte-timeout", f.firstByteTimeout},
		{"answer-timeout", f.answerTimeout},
		{"idle-timeout", f.idleTimeout},
		{"health-interval", f.healthInterval},
		{"health-timeout", f.healthTimeout},
		{"queue-timeout", f.queueTimeout},
		{"retry-backoff", f.backoff},
		{"dns-interval", f.dnsInterval},
		{"dns-keep", f.dnsKeep},
	} {
		if limit.value <= 0 {
			return fmt.Errorf("--%s is %v, want a positive time such as 30s", limit.flag, limit.value)
		}
	}
	if f.registerTTL < shortestTTL {
		return fmt.Errorf("--register-ttl is %v, want at least %v: engines register every 3s", f.registerTTL, shortestTTL)
	}
	return nil
}

// parseEvents reads the values of --kv-events.
func parseEvents(list []string) (map[string]kvevents.Place, error) {
	places := map[string]kvevents.Place{}
	for _, text := range list {
		url, endpoints, ok := strings.Cut(text, "=")
		if !ok || endpoints == "" {
			return nil, fmt.Errorf("--kv-events is %q, want URL=ENDPOINT or URL=ENDPOINT,REPLAY_ENDPOINT", text)
		}
		var p kvevents.Place
		p.Endpoint, p.ReplayEndpoint, _ = strings.Cut(endpoints, ",")
		if _, twice := places[url]; twice {
			return nil, fmt.Errorf("--kv-events has %s twice", url)
		}
		places[url] = p
	}
	return places, nil
}

// parseReplicas reads the values of --replica.
func parseReplicas(list []string) (replicas []router.Replica, err error) {
	const want = "want NAME=prefill:URL,...;decode:URL,..."
	for _, text := range list {
		name, parts, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("--replica is %q, %s", text, want)
		}
		r := router.Replica{Name: name}
		for part := range strings.SplitSeq(parts, ";") {
			role, urls, _ := strings.Cut(part, ":")
			to := map[string]*[]string{"prefill": &r.Prefill, "decode": &r.Decode}[role]
			if to == nil || urls == "" || *to != nil {
				return nil, fmt.Errorf("--replica %s: %q is not understood, %s", name, part, want)
			}
			*to = strings.Split(urls, ",")
		}
		replicas = append(replicas, r)
	}
	return replicas, nil
}

// upstream is the API key that instances get, empty if there is none, and how they are reached over HTTPS.
func (f *routeFlags) upstream() (key string, secure *tls.Config, err error) {
	if secure, err = f.upstreamTLS.client(); err != nil {
		return "", nil, fmt.Errorf("--upstream-ca-file or --upstream-cert-file: %w", err)
	}
	if f.upstreamKeyFile == "" {
		return "", secure, nil
	}
	if key, err = apikeys.ReadUpstream(f.upstreamKeyFile); err != nil {
		return "", nil, fmt.Errorf("--upstream-api-key-file: %w", err)
	}
	return key, secure, nil
}

// keyCheck finds the clients' keys in a front that is made later; nil if there are none.
func (f *routeFlags) keyCheck(t **front) func(authorization string) *apikeys.Key {
	if f.apiKeyFile == "" {
		return nil
	}
	return func(authorization string) *apikeys.Key { return (*t).key(authorization) }
}

// registration is how the router deals with instances that register, and by which keys; none without --register.
func (f *routeFlags) registration() (router.Registration, *keyring.File, error) {
	if f.register == "" {
		return router.Registration{}, nil, nil
	}
	keys, err := keyring.OpenAt(f.keyFile, slog.Default())
	if err != nil {
		return router.Registration{}, nil, err
	}
	return router.Registration{
		TTL:    f.registerTTL,
		Groups: f.mode == "replica",
		Verify: func(body, signature string) string {
			return ticket.VerifyForRouter(keys.Ring(), ticket.RegisterText, body, signature)
		},
		Sign: func(text string, by ...string) string { return signFor(keys, ticket.RequestIDText, text, by...) },
	}, keys, nil
}

// serveRegistrar takes registrations until ctx ends, by keys that it watches.
func (f *routeFlags) serveRegistrar(ctx context.Context, wg *sync.WaitGroup, r *router.Router, keys *keyring.File, registry prometheus.Registerer) error {
	if f.register == "" {
		return nil
	}
	l, err := f.registrar(ctx)
	if err != nil {
		return fmt.Errorf("--register: %w", err)
	}
	stale := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kvport_key_file_stale", Help: "1 if the file of keys has changed and cannot be read: the keys that it had stay in use.",
	})
	registry.MustRegister(stale)
	wg.Go(func() { keys.Watch(ctx, slog.Default(), func(is bool) { meter.Mark(stale, is) }) })
	slog.Info("instances can register", "address", l.Addr().String())
	server := &http.Server{
		Handler: r.Registrar(), ReadTimeout: 5 * time.Second, WriteTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug), // strangers can cause a line for each connection
	}
	wg.Go(func() { _ = server.Serve(l) }) // it ends with Close
	wg.Go(func() {
		<-ctx.Done()
		_ = server.Close()
	})
	return nil
}

// registrar opens where instances register.
func (f *routeFlags) registrar(ctx context.Context) (net.Listener, error) {
	if path, is := strings.CutPrefix(f.register, "unix://"); is {
		return listenUnix(ctx, path)
	}
	address, secure := strings.CutPrefix(f.register, "https://")
	if secure && f.certificate.scheme() != "https" {
		return nil, errors.New("https:// needs --tls-cert-file and --tls-key-file")
	}
	addr, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		return nil, err
	}
	l, err := net.ListenTCP("tcp", addr)
	if err != nil {
		return nil, err
	}
	gate := newGate(l, f.connections())
	if secure {
		return f.certificate.around(gate), nil
	}
	if !addr.IP.IsLoopback() {
		slog.Warn("registrations cross the network in clear text, signed: https://HOST:PORT with --tls-cert-file encrypts them", "address", f.register)
	}
	return gate, nil
}

// listenUnix listens at a socket that only this user reaches.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("unix://%s has no absolute path, want unix:///PATH", path)
	}
	unlock, err := lockFolder(ctx, filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := makeRoom(ctx, path); err != nil {
		return nil, err
	}
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var failed error
		err := raw.Control(func(fd uintptr) {
			failed = syscall.Fchmod(int(fd), 0o600) // Linux makes the socket's file with this mode: nobody connects before it is right
		})
		return errors.Join(err, failed)
	}}
	l, err := c.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if own, is := l.(*net.UnixListener); is {
		own.SetUnlinkOnClose(false) // by then it may be another router's
	}
	return l, nil
}

// lockFolder keeps other routers from making a socket in a folder until unlock: of two that start at once, the second
// would take away the socket that the first has just made in place of a dead one.
func lockFolder(ctx context.Context, dir string) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	folder, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(folder.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = folder.Close() }, nil
		}
		select {
		case <-ctx.Done():
			_ = folder.Close()
			return nil, fmt.Errorf("%s: another process holds a lock of this folder: %w", dir, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// makeRoom removes a socket that nobody listens at any more. Everything else at the path stays, and is an error.
func makeRoom(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s: there is something that is no socket", path)
	}
	c, err := new(net.Dialer).DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		_ = c.Close()
		return fmt.Errorf("%s: another process listens there", path)
	case errors.Is(err, syscall.ECONNREFUSED):
		return os.Remove(path)
	}
	return fmt.Errorf("%s: another process may listen there: %w", path, err)
}

// newRegistry is a metrics registry with the metrics of the process.
func newRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(newBuildInfo(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

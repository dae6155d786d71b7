-- Queue or schedule a failed job again, as RQ does for one with retries left, if this execution still
-- holds it. RQ's own way writes the status before the rest: a kill in between loses the job.
-- ARGV: those of end_execution.lua, when: as put_back takes it; the field that counts, and by how much;
--       results_ttl_s ('' keeps), then field, value, ... of the entry in rq:results, if there is one
-- Returns as finish.lua does; such a job has not ended, so its dependents wait on.
local when, ttl = ARGV[7], ARGV[10]
local reply = not_held()
if reply then return reply end

redis.call('HINCRBY', job, ARGV[8], ARGV[9])
redis.call('HSET', job, 'ended_at', ended_iso, 'last_heartbeat', ended_iso)
if #ARGV > 10 then
  add_result(11)
  expire_results(ttl)
end
put_back(when)
count('failed_job_count')
close_execution()
return 'done'
